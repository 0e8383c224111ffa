"""What is measured for each question: NLL of the gold value, KL to the full cache, the same first choice."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.fidelity_parts.documents import Asked
from benchmarks.fidelity_parts.reader import KV, Ask, Kept, Plan, Reader

_ROWS_AT_ONCE = 512
LEAST_GAIN = 0.5
"""Questions that the full cache answers less than this many nats better than no document at all are not counted."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question under one method. `nll`: of the whole value, nats; `kl`, `same`: per answer token."""

    nll: float
    kl: list[float]
    same: list[bool]


class Answers:
    """The questions of one document as one batch, and the full cache's predictions to compare with."""

    def __init__(self, reader: Reader, questions: list[Asked], kv: KV) -> None:
        self._reader = reader
        self.questions = questions
        longest = max(len(q.ids) for q in questions)
        self._ids = reader.tensor([q.ids + [0] * (longest - len(q.ids)) for q in questions])
        self._n_rows = [len(q.targets) for q in questions]
        self._targets = reader.tensor([t for q in questions for t in q.targets])
        self._value = torch.tensor([v for q in questions for v in q.value], device=reader.device)
        self._reference = self._logs(kv.n_tokens, Ask(kv, everything(kv)))

    def _logs(self, first_position: int, plan: Plan, only: int | None = None) -> Tensor:
        """Log-probabilities of the rows that predict answers, question after question: ``[rows, vocab]``."""
        questions = list(enumerate(self.questions)) if only is None else [(0, self.questions[only])]
        ids = self._ids if only is None else self._ids[only : only + 1, : len(self.questions[only].ids)]
        hidden = self._reader.hidden(ids, first_position, plan)
        rows = torch.cat([hidden[i, q.n_question - 1 : len(q.ids)] for i, q in questions])
        return self._reader.model.lm_head(rows).log_softmax(-1)

    def outcomes(self, kv: KV, kept: Kept, fetched: Tensor | None = None, twice: bool = False) -> list[Outcome]:
        """All questions over the same kept rows."""
        return self._compared(self._logs(kv.n_tokens, Ask(kv, kept, fetched, twice)))

    def outcomes_of_texts(self, texts: Sequence[list[int]]) -> list[Outcome]:
        """Each question over a text of its own that is read afresh, or, given one text, all over that."""
        if len(texts) == 1:
            kv = self._reader.prefill(texts[0])
            return self.outcomes(kv, everything(kv))
        logs = []
        for i, ids in enumerate(texts):
            kv = self._reader.prefill(ids)
            logs.append(self._logs(kv.n_tokens, Ask(kv, everything(kv)), i))
        return self._compared(torch.cat(logs))

    def _compared(self, logs: Tensor) -> list[Outcome]:
        nll = -logs.gather(1, self._targets[:, None])[:, 0]
        same = logs.argmax(-1) == self._reference.argmax(-1)
        pairs = zip(self._reference.split(_ROWS_AT_ONCE), logs.split(_ROWS_AT_ONCE), strict=True)
        kl = torch.cat([(p.exp() * (p - q)).sum(-1, dtype=torch.float64).clamp_min(0) for p, q in pairs])
        parts = zip(*(x.split(self._n_rows) for x in (nll, kl, same, self._value)), strict=True)
        return [Outcome(float(n[v].sum()), k.tolist(), s.tolist()) for n, k, s, v in parts]


def everything(kv: KV) -> Kept:
    """All rows of a document."""
    layers, heads, n = kv.k.shape[:3]
    rows = torch.arange(n, device=kv.k.device).expand(heads, n)
    return Kept([rows] * layers, torch.ones(n, dtype=torch.bool, device=kv.k.device))


def recovery(none: float, kept: float, full: float) -> float:
    """1: as good as the full cache, 0: as bad as no document."""
    return (none - kept) / (none - full)
