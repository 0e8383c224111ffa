"""The model's parameters, measured with one worker and one user: nothing of the runs that they predict."""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.capacity_parts.installation import Installation, text
from benchmarks.capacity_parts.load import Asker, Reply

SHORT, LONG = "Who?", "Who keeps the lamp, and who wrote it down? " * 4
SMALL, LARGE = 800, 3200
"""Bytes of the documents that are asked about."""
TOKENS = 6
EACH = 3


@dataclass(frozen=True, slots=True)
class Calibration:
    """`question_tokens`: rows of a short question. `load_s`: of each token of a document that comes from the disk, all
    of it on the engine's thread; `restore_s`: what is added whatever the size, `redis_s` and `object_s`: by the tier.
    `api_s`: of a first token, beside the engine's steps. `prefill_s`: of each token of a document that is read."""

    step_s: float
    row_s: float
    load_s: float
    restore_s: float
    redis_s: float
    object_s: float
    api_s: float
    hold_s: float
    prefill_s: float
    question_tokens: int


class Calibrator:
    """`n_resident`: documents of these sizes that are more than the worker's memory holds."""

    def __init__(self, installation: Installation, n_resident: int) -> None:
        self._installation = installation
        self._n = n_resident

    def run(self) -> Calibration:
        """About a minute. The first worker is started three times."""
        there = self._installation
        half = max(self._n, EACH)
        bodies = there.read([text(SMALL, 900 + n) for n in range(half)] + [text(LARGE, 950 + n) for n in range(half)])
        ids, tokens = [body["id"] for body in bodies], [body["token_count"] for body in bodies]
        small, large = ids[:half], ids[half:]
        disk_small, disk_large = self._replies(small[:EACH]), self._replies(large[:EACH])
        resident = self._replies([large[EACH - 1]] * (EACH + 1))[1:]
        long = self._replies([large[EACH - 1]] * EACH, LONG)
        there.lose_disk()
        redis = self._replies(small[:EACH])
        there.empty_redis()
        there.lose_disk()
        away = self._replies(small[:EACH])
        for kind, of in (("resident", resident), ("disk", disk_large), ("redis", redis), ("object", away)):
            assert {reply.source for reply in of} == {kind}, (kind, of)
        rows = _rows()
        gap = _median([reply.gap_s for reply in resident])
        row_s = (_median([r.first_s for r in long]) - _median([r.first_s for r in resident])) / (rows[1] - rows[0])
        step_s = gap - row_s
        load_s = (_restore(disk_large) - _restore(disk_small)) / (tokens[half] - tokens[0])
        there.delete(ids)
        return Calibration(
            step_s=step_s,
            row_s=row_s,
            load_s=load_s,
            restore_s=max(_restore(disk_small) - load_s * tokens[0], 0.0),
            redis_s=_restore(redis) - _restore(disk_small),
            object_s=_restore(away) - _restore(disk_small),
            api_s=_median([r.first_s for r in resident]) - step_s - row_s * (rows[0] + 1),
            hold_s=_median([r.end_s for r in resident]),
            prefill_s=_median([body["snapshot"]["build_s"] / body["token_count"] for body in bodies]),
            question_tokens=rows[0],
        )

    def _replies(self, document_ids: Sequence[str], question: str = SHORT) -> list[Reply]:
        async def ask() -> list[Reply]:
            async with Asker(self._installation.api.url) as asker:
                found = [await asker.ask(await asker.session(each), question, TOKENS) for each in document_ids]
                return [reply for reply in found if reply is not None]

        return asyncio.run(ask())


def _rows() -> tuple[int, int]:
    """Of the two questions: the fake engine's tokens are bytes, and its template adds the same to both."""
    from service.core.prompts import fake_prompts

    template = fake_prompts().template
    return len(template.question(SHORT)), len(template.question(LONG))


def _restore(replies: Sequence[Reply]) -> float:
    return _median([reply.restore_s for reply in replies])


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
