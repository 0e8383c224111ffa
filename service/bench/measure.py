"""Measures an engine through the calls that the service makes. Every figure is warm and repeated."""

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from service.bench.physics import Physics
from service.bench.results import Row
from service.engine.digests import digest_of
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    AnswerText,
    BuildDone,
    BuildRequest,
    DocumentRef,
    Failed,
    Sampling,
)
from service.engine.protocol import EngineClient, EngineLost

QUESTION_TOKENS = 24
FIRST_TOKENS = 2
OWNER = "bench"
TRIES = 8
LEAST_ID = 32
"""Lower ids are often those of control tokens."""
FAKE_VOCAB = 240


@dataclass(frozen=True, slots=True)
class Work:
    """What to measure: lengths of documents, users at once, repeats, tokens of each answer."""

    contexts: Sequence[int] = (1024, 4096)
    users: Sequence[int] = (1, 4, 8)
    repeats: int = 3
    answer_tokens: int = 24
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer: where its document came from, seconds to its first text and of its restore, tokens, and when its
    first and last text came (of one clock)."""

    source: str
    first_s: float
    restore_s: float
    tokens: int
    began: float
    ended: float


@dataclass
class Bench:
    """Measures over an open engine whose snapshots lie in `store_dir`. `tell` is told what is measured next."""

    engine: EngineClient
    store_dir: Path
    physics: Physics | None
    work: Work
    tell: Callable[[str], None] = lambda text: None
    _documents: dict[str, list[int]] = field(default_factory=dict)
    _asked: int = 0

    async def rows(self) -> list[Row]:
        """All figures. Raises EngineLost when a document cannot be read or a question not answered."""
        found: list[Row] = []
        await self._build("warm", min(self.work.contexts))
        await self._ask("warm", self.work.answer_tokens)
        for context in self.work.contexts:
            self.tell(f"prefill of {context:,} tokens")
            found += await self._prefill(context)
            self.tell(f"decode behind {context:,} tokens")
            found += await self._decode(context)
            self.tell(f"first tokens behind {context:,} tokens")
            found += await self._first_tokens(context)
        self.tell("decode on different documents")
        found += await self._apart(min(self.work.contexts))
        return found

    async def _prefill(self, context: int) -> list[Row]:
        """As a job that writes the snapshot; and the whole way from a document to its first token."""
        speeds, firsts = [], []
        for i in range(self.work.repeats):
            name = f"{context}" if i == 0 else f"{context}-{i}"
            started = time.perf_counter()
            done = await self._build(name, context)
            firsts.append(time.perf_counter() - started + (await self._ask(name, FIRST_TOKENS)).first_s)
            speeds.append(done.n_tokens / max(done.seconds, 1e-9))
            if i:
                await self.engine.release(DocumentRef(OWNER, name))
        bound = self.physics.prefill_tok_s(context) if self.physics else 0.0
        flops = context * (self.physics.token_flops + context / 2 * self.physics.row_flops) if self.physics else 0.0
        nbytes = float(self.physics.step_nbytes) if self.physics else 0.0
        return [
            Row(f"prefill, {context} tokens", "tok/s", speeds, nbytes=nbytes, bound=bound, flops=flops),
            Row(f"first token, cold, {context} tokens", "s", firsts, higher_is_better=False),
        ]

    async def _decode(self, context: int) -> list[Row]:
        """Users who ask about one document at once: tokens a second of all."""
        found = []
        for users in self.work.users:
            samples = [await self._together([f"{context}"] * users) for _ in range(self.work.repeats)]
            found.append(
                self._decoded(f"decode, {context} tokens, {users} users, one document", samples, context, users, 1)
            )
        return found

    async def _apart(self, context: int) -> list[Row]:
        """Users who ask about a document each."""
        found = []
        for users in self.work.users:
            if users < 2:
                continue
            names = [f"apart-{i}" for i in range(users)]
            for name in names:
                await self._build(name, context)
            samples = [await self._together(names) for _ in range(self.work.repeats)]
            what = f"decode, {context} tokens, {users} users, {users} documents"
            found.append(self._decoded(what, samples, context, users, users))
        return found

    def _decoded(self, name: str, samples: list[float], context: int, users: int, documents: int) -> Row:
        row = Row(name, "tok/s", samples)
        if self.physics is None:
            return row
        nbytes, flops = self.physics.step(context, users, documents)
        steps = row.value / users
        bound = users * min(self.physics.bandwidth_gbps * 1e9 / nbytes, self.physics.tflops * 1e12 / flops)
        return Row(name, "tok/s", samples, nbytes=nbytes, gbps=steps * nbytes / 1e9, bound=bound, flops=flops)

    async def _first_tokens(self, context: int) -> list[Row]:
        """From memory, and from the disk with its pages forgotten; of the latter also the restore alone."""
        name = f"{context}"
        memory = [await self._ask(name, FIRST_TOKENS) for _ in range(self.work.repeats)]
        disk = []
        for _ in range(self.work.repeats):
            await self.engine.release(DocumentRef(OWNER, name))
            forget_pages(self.store_dir)
            disk.append(await self._ask(name, FIRST_TOKENS))
        found = [
            Row(f"first token, {memory[0].source}, {context} tokens", "s", [a.first_s for a in memory], False),
            Row(f"first token, {disk[0].source}, {context} tokens", "s", [a.first_s for a in disk], False),
        ]
        if self.physics is not None:
            nbytes = float(context * self.physics.stored_row_nbytes)
            speeds = [nbytes / max(answer.restore_s, 1e-9) / 1e9 for answer in disk]
            row = Row(f"restore, {disk[0].source}, {context} tokens", "GB/s", speeds, nbytes=nbytes)
            found.append(row)
        return found

    async def _together(self, names: Sequence[str]) -> float:
        """Tokens a second while all of these answers run: first texts are not counted, nor the time before them."""
        answers = await self._long_answers(names)
        began, ended = max(a.began for a in answers), max(a.ended for a in answers)
        alone = [a for a in answers if a.ended > began]
        tokens = sum((a.tokens - 1) * (a.ended - began) / max(a.ended - a.began, 1e-9) for a in alone)
        return tokens / max(ended - began, 1e-9)

    async def _long_answers(self, names: Sequence[str]) -> list[Answered]:
        """To other questions when one ended its answer early: a few tokens are no figure."""
        for _ in range(TRIES):
            answers = await asyncio.gather(*(self._ask(name, self.work.answer_tokens) for name in names))
            if all(2 * answer.tokens > self.work.answer_tokens for answer in answers):
                return answers
        raise EngineLost(f"the model ends its answers before {self.work.answer_tokens} tokens: ask for fewer")

    async def _build(self, name: str, context: int) -> BuildDone:
        ids = self._documents.setdefault(name, self._tokens(context, name))
        events = [e async for e in self.engine.build(BuildRequest(f"build-{name}", DocumentRef(OWNER, name), ids))]
        event = events[-1]
        if not isinstance(event, BuildDone):
            raise EngineLost(f"a document of {context} tokens was not read: {_why(event)}")
        return event

    async def _ask(self, name: str, max_tokens: int) -> Answered:
        self._asked += 1
        ids, who = self._documents[name], f"ask-{self._asked}"
        question = self._tokens(QUESTION_TOKENS, who)
        request = AnswerRequest(
            who, who, DocumentRef(OWNER, name), digest_of(ids), len(ids), [], question,
            Sampling(max_tokens=max_tokens),
        )  # fmt: skip
        started, first, last = time.perf_counter(), 0.0, 0.0
        source, restore_s = "", 0.0
        async for event in self.engine.answer(request):
            if isinstance(event, AnswerStarted):
                source, restore_s = event.source, event.restore_ms / 1e3
            elif isinstance(event, AnswerText):
                last = time.perf_counter()
                first = first or last
            elif isinstance(event, AnswerDone):
                await self.engine.release_session(who)
                began = first or started + event.ttft_ms / 1e3
                ended = max(last, began)
                return Answered(source, began - started, restore_s, event.completion_tokens, began, ended)
            elif isinstance(event, Failed):
                raise EngineLost(f"a question was not answered: {_why(event)}")
        raise EngineLost("an answer ended without its end")

    def _tokens(self, n: int, name: str) -> list[int]:
        """Random tokens, the same in every run: speed does not depend on what they say."""
        chosen = random.Random(f"{self.work.seed}/{name}")  # noqa: S311
        most = self.physics.vocab_size if self.physics else FAKE_VOCAB
        return [chosen.randrange(LEAST_ID, max(most, LEAST_ID + 1)) for _ in range(n)]


def _why(event: object) -> str:
    return event.detail if isinstance(event, Failed) else "it said nothing"


def forget_pages(directory: Path) -> None:
    """Ask the system to forget the files of a directory: the next read comes from the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in _files(directory):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())
