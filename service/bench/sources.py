"""First tokens and restores of a document, by where it is when the question comes."""

import asyncio
from typing import Any, Protocol

from service.bench.figures import Figures
from service.bench.files import FarCopies, SnapshotFiles
from service.bench.results import Row
from service.bench.talk import FIRST_TOKENS, Answered, Talk
from service.bench.waiting import in_thread
from service.engine.protocol import EngineLost

HOST_WAIT_S = 60.0
"""Page-locked memory is made in the background, a third of a second a GB."""
_POLL_S = 0.5


class Repeated(Protocol):
    """Takes samples as often as wanted, and as time allows."""

    async def __call__(self, sample: Any, /) -> list[Any]: ...


class Sources:
    """Each method measures a document that was read under `name` and has `context` tokens."""

    def __init__(self, talk: Talk, files: SnapshotFiles, figures: Figures, repeated: Repeated) -> None:
        self._talk = talk
        self._files = files
        self._figures = figures
        self._repeated = repeated

    async def memory(self, name: str, context: int) -> list[Row]:
        """In the memory where the model computes: nothing is restored."""
        await self._talk.ask(name, FIRST_TOKENS)
        answers: list[Answered] = await self._repeated(lambda: self._talk.ask(name, FIRST_TOKENS))
        return [self._figures.first(answers[0].source, context, [answer.first_s for answer in answers])]

    async def host(self, name: str, context: int) -> list[Row]:
        """In host memory, after it left the card. Raises EngineLost when there is no room for it."""

        async def sample() -> Answered:
            await self._to_host(name)
            return self._from("host", await self._talk.ask(name, FIRST_TOKENS))

        return self._rows("host", context, await self._repeated(sample), self._figures.host_gbps)

    async def disk(self, name: str, context: int) -> list[Row]:
        """On the disk, and its pages forgotten."""
        plain: list[float] = []

        async def sample() -> Answered:
            await self._talk.engine.release(self._talk.ref(name))
            plain.append(await in_thread(self._files.read_gbps, name))
            await in_thread(self._files.forget_pages, name)
            return self._from("disk", await self._talk.ask(name, FIRST_TOKENS))

        answers = await self._repeated(sample)
        return self._rows("disk", context, answers, max(plain))

    async def far(self, copies: FarCopies, name: str, context: int) -> list[Row]:
        """In a tier beyond the disk: brought to the disk, checked, and restored from there. Raises TierDown,
        TierRefused, SnapshotMiss."""
        plain: list[float] = []
        await in_thread(copies.send, name)

        async def sample() -> tuple[float, Answered]:
            await self._talk.engine.release(self._talk.ref(name))
            plain.append(await in_thread(copies.read_gbps, name))
            seconds = await in_thread(copies.bring, name)
            return seconds, self._from("disk", await self._talk.ask(name, FIRST_TOKENS))

        samples = await self._repeated(sample)
        firsts = [seconds + answer.first_s for seconds, answer in samples]
        restores = [seconds + answer.restore_s for seconds, answer in samples]
        return self._figures.restored(copies.tier.name, context, firsts, restores, max(plain))

    async def _to_host(self, name: str) -> None:
        """Wait until host memory takes the document."""
        for _ in range(int(HOST_WAIT_S / _POLL_S)):
            await self._talk.ask(name, FIRST_TOKENS)
            if await self._talk.engine.move_out(self._talk.ref(name)):
                return
            await asyncio.sleep(_POLL_S)
        raise EngineLost("host memory has no room for the document (PREREAD_HOST_BYTES)")

    def _rows(self, source: str, context: int, answers: list[Answered], gbps: float) -> list[Row]:
        firsts, restores = [a.first_s for a in answers], [a.restore_s for a in answers]
        return self._figures.restored(source, context, firsts, restores, gbps)

    def _from(self, source: str, answer: Answered) -> Answered:
        """A figure is of the place that it names, or there is none."""
        if answer.source != source:
            raise EngineLost(f"the document came from {answer.source}, not from {source}")
        return answer
