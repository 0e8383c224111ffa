"""What is measured, in which order, and what becomes of it when time, memory or a tier fails."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cache_store.errors import CacheStoreError
from cache_store.tiers.tier import BlobTier
from service.bench.figures import Figures
from service.bench.files import FarCopies, SnapshotFiles
from service.bench.pace import Cost, Deadline, Pace
from service.bench.physics import Physics
from service.bench.results import LeftOut, Row
from service.bench.sources import Repeated, Sources
from service.bench.talk import FIRST_TOKENS, QUESTION_TOKENS, Talk
from service.bench.waiting import in_thread
from service.engine.local import LocalEngine
from service.engine.protocol import EngineLost

FAKE_VOCAB = 240
TIME_OVER = "the time was over (--minutes)"


@dataclass(frozen=True, slots=True)
class Work:
    """What to measure: lengths of documents, users at once, repeats, tokens of each answer, in how many minutes."""

    contexts: Sequence[int] = (1024, 4096)
    users: Sequence[int] = (1, 4, 8)
    repeats: int = 3
    answer_tokens: int = 24
    minutes: float = 15.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """What is measured now, which part of how many it is, and the seconds that this and the rest will take."""

    name: str
    number: int
    parts: int
    left_s: float


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows that are measured together. `context`: the document that it needs, or makes (`makes`)."""

    name: str
    cost: Cost
    context: int
    run: Callable[[], Awaitable[list[Row]]]
    makes: bool = False


@dataclass
class Bench:
    """Measures over an open engine whose snapshots lie in `store_dir`, and in the tiers `far` beyond the disk, as those
    of `owner`. `rows` grows while it runs, `left_out` says what could not be measured and why; `tell` is told
    what comes next."""

    engine: LocalEngine
    store_dir: Path
    physics: Physics | None
    work: Work
    owner: str = "bench"
    far: Sequence[BlobTier] = ()
    tell: Callable[[Progress], None] = lambda progress: None
    rows: list[Row] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    async def run(self) -> None:
        """Measure all that there is time for. Raises EngineLost when not even the warm-up is answered."""
        self._talk = Talk(self.engine, self.owner, self.physics.vocab_size if self.physics else FAKE_VOCAB)
        self._files = SnapshotFiles(self.store_dir, self.owner, self.engine.info.fingerprint_digest)
        self._figures = Figures(self.physics)
        self._deadline = Deadline(60 * self.work.minutes)
        self._copies = [FarCopies(self._files, tier) for tier in self.far]
        self._repeated: Repeated = partial(self._deadline.repeated, self.work.repeats)
        self._sources = Sources(self._talk, self._files, self._figures, self._repeated)
        try:
            await self._all(list(self._parts()), await self._warm())
        finally:
            await in_thread(self._clean)

    async def _warm(self) -> Pace:
        """Nothing of it is a figure, but for the time that the rest will take."""
        context = min(self.work.contexts)
        built = await self._talk.build("warm", context)
        answer = await self._talk.ask("warm", self.work.answer_tokens)
        step_s = (answer.ended - answer.began) / max(answer.tokens - 1, 1)
        return Pace(built.seconds / context, step_s)

    async def _all(self, parts: list[_Part], pace: Pace) -> None:
        lost = self._too_long()
        for i, part in enumerate(parts):
            left_s = pace.left_s(other.cost for other in parts[i:] if other.context not in lost)
            self.tell(Progress(part.name, i + 1, len(parts), left_s))
            began = time.monotonic()
            try:
                why = lost.get(part.context) or await self._one(part)
            except asyncio.CancelledError:
                self.left_out += [LeftOut(other.name, "it was ended before") for other in parts[i:]]
                raise
            if why:
                self.left_out.append(LeftOut(part.name, why))
                if part.makes:
                    lost.setdefault(part.context, f"the document of {part.context} tokens was not read")
            else:
                pace.ended(part.cost, time.monotonic() - began)

    def _too_long(self) -> dict[int, str]:
        """Documents that are not even tried, with the reason: reading one can take an hour."""
        room = self.engine.info.max_context - QUESTION_TOKENS - self.work.answer_tokens
        why = f"the model's context has room for documents of {room} tokens"
        if room <= 0:
            why = "question and answer fill the model's context: ask for fewer tokens (--answer-tokens)"
        return {context: why for context in self.work.contexts if context > room}

    async def _one(self, part: _Part) -> str:
        """Why it was not measured; "" if it was."""
        if self._deadline.left_s <= 0:
            return TIME_OVER
        if not self.engine.alive:
            return "the engine has ended"
        limit = asyncio.timeout(self._deadline.left_s)
        try:
            async with limit:
                self.rows += await part.run()
        except (EngineLost, CacheStoreError, OSError) as error:
            # A TimeoutError may be that of a disk or a connection, too.
            return TIME_OVER if limit.expired() else _said(error)
        return ""

    def _parts(self) -> Iterator[_Part]:
        """In the order in which they are of use when the time runs out: short documents first."""
        work, part = self.work, _Part
        question = Cost(QUESTION_TOKENS * work.repeats, FIRST_TOKENS * work.repeats)
        for context in sorted(set(work.contexts)):
            cost = Cost(work.repeats * context)
            yield part(f"prefill of {context:,} tokens", cost, context, partial(self._prefill, context), makes=True)
            for users in work.users:
                name = f"decode behind {context:,} tokens, {users} {'user' if users == 1 else 'users'}"
                cost = Cost(steps=work.repeats * work.answer_tokens, users=users)
                yield part(name, cost, context, partial(self._decode, context, users))
            for place, measure in self._places():
                name = f"first token from {place}, {context:,} tokens"
                yield part(name, question, context, partial(measure, f"{context}", context))
        context = min(work.contexts)
        for before, users in zip([0, *work.users], work.users, strict=False):
            if users > 1:
                name = f"decode of {users} users on {users} documents of {context:,} tokens"
                new = context * max(users - before * (before > 1), 0)
                cost = Cost(new, work.repeats * work.answer_tokens, users)
                yield part(name, cost, 0, partial(self._apart, context, users))

    def _places(self) -> Iterator[tuple[str, Callable[[str, int], Awaitable[list[Row]]]]]:
        """Where a document can be, the nearest first; the first one has it in memory."""
        yield "memory", self._sources.memory
        if self.engine.has_host_tier:
            yield "host memory", self._sources.host
        yield "disk", self._sources.disk
        for copies in self._copies:
            yield copies.tier.name, partial(self._sources.far, copies)

    async def _prefill(self, context: int) -> list[Row]:
        """As a job that writes the snapshot; and the whole way from a document to its first token."""
        names: list[str] = []

        async def sample() -> tuple[float, float]:
            names.append(f"{context}" if not names else f"{context}-{len(names)}")
            started = time.perf_counter()
            done = await self._talk.build(names[-1], context)
            first_s = time.perf_counter() - started + (await self._talk.ask(names[-1], FIRST_TOKENS)).first_s
            if len(names) > 1:
                await self._forget(names[-1])
            return done.n_tokens / max(done.seconds, 1e-9), first_s

        speeds, firsts = zip(*await self._repeated(sample), strict=True)
        return [self._figures.prefill(context, list(speeds)), self._figures.cold(context, list(firsts))]

    async def _decode(self, context: int, users: int) -> list[Row]:
        """Users who ask about one document at once: tokens a second of all."""
        name = f"decode, {context} tokens, {users} users, one document"
        return [self._figures.decode(name, await self._speeds([f"{context}"] * users), context, users, 1)]

    async def _apart(self, context: int, users: int) -> list[Row]:
        """Users who ask about a document each."""
        names = [f"apart-{i}" for i in range(users)]
        for name in names:
            await self._talk.build(name, context)
        told = f"decode, {context} tokens, {users} users, {users} documents"
        return [self._figures.decode(told, await self._speeds(names), context, users, users)]

    async def _speeds(self, names: Sequence[str]) -> list[float]:
        await self._talk.all_at_once(names, FIRST_TOKENS)  # a batch of this size for the first time
        return await self._repeated(lambda: self._talk.together(names, self.work.answer_tokens))

    async def _forget(self, name: str) -> None:
        """A document that is of no more use takes no memory and no disk from the others."""
        await self.engine.release(self._talk.ref(name))
        await in_thread(self._files.discard, name)

    def _clean(self) -> None:
        for copies in self._copies:
            try:
                copies.remove_all()
            except (CacheStoreError, OSError) as error:
                why = f"{_said(error)}; `preread snapshots gc` removes them"
                self.left_out.append(LeftOut(f"removing the copies in the {copies.tier.name} tier", why))


def _said(error: Exception) -> str:
    """Never nothing: a part without a reason is one that was measured."""
    return str(error) or type(error).__name__
