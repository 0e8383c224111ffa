"""Where an answer looked in its documents: from the runner's attention over rows to the tokens these rows are."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from service.engine.host.context import HostContext
from service.engine.host.fetching import Fetched
from service.engine.host.residency import ResidentDocument
from service.engine.host.tails import Tail
from service.engine.messages import Look, PieceLooks
from service.engine.scheduler.sequence import AnswerWriter
from service.engine.watch.masses import WATCH_SPAN, Looks

RowRanges = Sequence[tuple[int, int, int]]
"""Of a document of the runner, in the order of its rows: which document of the answer, and its tokens [first, last)."""

MOST_LOOKS = 12
"""Places told of a piece of an answer; what is looked at less is only in the sum."""
_LEAST = 0.01
"""Of a piece's attention to the documents: a place with less is not told."""
_PIECE_TOKENS = 32
"""Tokens of a piece at most."""
_MOST_SPANS = 1 << 40

Bins = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """An answer in pieces: `n_tokens` of each, and where its text ends, in characters of the answer."""

    n_tokens: list[int]
    ends: list[int]

    @classmethod
    def of(cls, writer: AnswerWriter, n_sampled: int) -> "Pieces":
        """A sentence of the answer consists of whole pieces, unless it is cut in the middle of a clause. What ends the
        answer, and has no text, belongs to the last one."""
        n_said, cuts = len(writer.breaks), [0]
        for n, breaks in enumerate(writer.breaks, 1):
            if breaks or n - cuts[-1] == _PIECE_TOKENS or n == n_said:
                cuts.append(n)
        ends = [writer.ends[cut - 1] for cut in cuts[1:]]
        cuts[-1] += n_sampled - n_said if ends else 0
        return cls([b - a for a, b in pairwise(cuts)], ends)


def watch(context: HostContext, tail: Tail) -> None:
    """Have the runner keep what it takes to say where the answer in this tail looks."""
    if context.runner.watched_heads:
        context.scheduler.run(context.runner.watch_tail, tail.slot)


def looks_of_answer(
    context: HostContext, document: ResidentDocument, tail: Tail, fetched: Fetched, ranges: RowRanges, pieces: Pieces
) -> tuple[list[PieceLooks], float]:
    """Where each piece looked, and how many milliseconds that took; nothing where heads are not watched. While the
    answer's rows end the tail, and what was fetched for it is there."""
    runner = context.runner
    if not runner.watched_heads or not pieces.n_tokens:
        return [], 0.0
    started = time.monotonic()
    looks = context.scheduler.run(runner.tail_looks, tail.slot, document.handle, pieces.n_tokens)
    bins, masses = _binned(looks, document, tail, fetched, ranges)
    told = [
        _told(bins, of_piece / n, end) for of_piece, n, end in zip(masses, pieces.n_tokens, pieces.ends, strict=True)
    ]
    return told, (time.monotonic() - started) * 1e3


def _binned(
    looks: Looks, document: ResidentDocument, tail: Tail, fetched: Fetched, ranges: RowRanges
) -> tuple[Bins, npt.NDArray[np.float32]]:
    """Runs of WATCH_SPAN tokens of the documents, and the attention of each piece to them, ``[n_pieces, n_bins]``."""
    first = tail.n_tokens
    spans = [(span.document, span.first, span.first + span.n_tokens) for span in fetched.spans]
    n_fetched = sum(last - begin for _, begin, last in spans)
    parts = [
        (_span_bins(ranges, looks.document.shape[1]), looks.document),
        (_row_bins(spans), looks.tail[:, first : first + n_fetched]),
        *((places // WATCH_SPAN, of_head) for places, of_head in zip(document.slot_places, looks.slots, strict=False)),
    ]
    found = np.concatenate([bins for bins, _ in parts])
    masses = torch.cat([mass for _, mass in parts], 1).numpy()
    bins, where = np.unique(found, return_inverse=True)
    summed = np.zeros((len(bins), len(masses)), np.float32)
    np.add.at(summed, where, masses.T)
    return bins, summed.T


def _row_bins(ranges: RowRanges) -> Bins:
    """The bin of each row."""
    rows = [number * _MOST_SPANS + np.arange(first, last) // WATCH_SPAN for number, first, last in ranges]
    return np.concatenate([np.empty(0, np.int64), *rows])


def _span_bins(ranges: RowRanges, n_spans: int) -> Bins:
    """The bin of each run of WATCH_SPAN rows, which need not be consecutive tokens: that of its middle row."""
    rows = _row_bins(ranges)
    middles = np.minimum(np.arange(n_spans) * WATCH_SPAN + WATCH_SPAN // 2, len(rows) - 1)
    return rows[middles] if len(rows) else np.empty(0, np.int64)


def _told(bins: Bins, masses: npt.NDArray[np.float32], end: int) -> PieceLooks:
    total = float(masses.sum())
    best = [int(i) for i in np.argsort(-masses, kind="stable")[:MOST_LOOKS] if masses[i] >= _LEAST * total > 0]
    told: list[Look] = []
    for i in best:
        document, place = divmod(int(bins[i]), _MOST_SPANS)
        told.append(Look(place * WATCH_SPAN, WATCH_SPAN, round(float(masses[i]), 4), document))
    return PieceLooks(end, round(total, 4), told)
