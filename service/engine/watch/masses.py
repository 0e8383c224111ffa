"""Attention of a few heads, from queries that were kept while an answer was computed and the keys that they saw.

Decoding keeps nothing but a query of each head for each token. What it looked at is computed once, when the answer is
over: one product with the keys of some heads for all of its tokens, where a step reads those of all heads for each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WATCH_SPAN = 16
"""Rows of a document whose attention is added up."""
_PIECE = 1 << 21  # scores at a time: memory stays bounded whatever the lengths
_MOST_ROWS = 1024

Keys = Callable[[slice], Tensor]


@dataclass(frozen=True, slots=True)
class HeadKeys:
    """What one KV head saw, each ``[n, head_dim]``, in the space of the queries: `document` gives FP32 keys of a slice
    of the document's `n_document` rows, `slots` its slots, `tail` the sequence's own rows and fetched ones."""

    document: Keys
    n_document: int
    slots: Tensor
    tail: Tensor


@dataclass(frozen=True, slots=True)
class Looks:
    """Attention probabilities of the pieces of an answer, added up over a piece's tokens, the mean of all heads:
    FP32 on the CPU.

    `document`: ``[n_pieces, n_spans]``, of WATCH_SPAN rows each; `slots`: of each watched KV head ``[n_pieces, n]``,
    its share of the mean; `tail`: ``[n_pieces, n]``.
    """

    document: Tensor
    slots: list[Tensor]
    tail: Tensor


def looks_of(queries: Sequence[Tensor], keys: Sequence[HeadKeys], pieces: Sequence[int]) -> Looks:
    """`queries` of each head, scaled: ``[heads per KV head, n, head_dim]``, of the n rows that end the tail, in order;
    row i sees the tail through its own. `pieces`: how many rows each has, n together."""
    found = [_of_head(q, seen, pieces) for q, seen in zip(queries, keys, strict=True)]
    share = 1 / len(found)
    document, tail = (torch.stack([of_head[i] for of_head in found]).mean(0) for i in (0, 2))
    return Looks(document, [of_head[1] * share for of_head in found], tail)


def _of_head(queries: Tensor, keys: HeadKeys, pieces: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the rows of each piece, the mean over the heads of `queries`."""
    group, n, _ = queries.shape
    most = min(_MOST_ROWS, _PIECE * WATCH_SPAN // max(keys.n_document, 1))
    first, sums, step = keys.tail.shape[0] - n, [], max(most // group, 1)
    for at in range(0, n, step):
        rows = queries[:, at : at + step].float()
        logs = torch.cat((_document(rows, keys), _slots(rows, keys), _tail(rows, keys.tail, first + at)), -1)
        sums.append(logs.softmax(-1).mean(0))
    masses = torch.cat(sums)
    summed = torch.stack([of_piece.sum(0) for of_piece in masses.split(list(pieces))]).cpu()
    n_spans = -(-keys.n_document // WATCH_SPAN)
    return tuple(summed.split([n_spans, keys.slots.shape[0], keys.tail.shape[0]], -1))  # type: ignore[return-value]


def _document(rows: Tensor, keys: HeadKeys) -> Tensor:
    """Logs of the summed exponentials of each span's scores, ``[group, n, n_spans]``."""
    group, n, dim = rows.shape
    flat, found = rows.reshape(group * n, dim), [rows.new_empty(group * n, 0)]
    step = max(_PIECE // max(group * n, dim) // WATCH_SPAN, 1) * WATCH_SPAN
    for at in range(0, keys.n_document, step):
        scores = flat @ keys.document(slice(at, min(at + step, keys.n_document))).T
        found.append(span_logs(scores, WATCH_SPAN))
    return torch.cat(found, -1).view(group, n, -1)


def _slots(rows: Tensor, keys: HeadKeys) -> Tensor:
    return rows @ keys.slots.float().T


def _tail(rows: Tensor, tail: Tensor, first: int) -> Tensor:
    """Scores of rows that stand in the tail from `first` on, ``[group, n, n_tail]``."""
    scores = rows @ tail.float().T
    ends = torch.arange(first, first + rows.shape[1], device=tail.device)[:, None]
    return scores.masked_fill_(torch.arange(tail.shape[0], device=tail.device)[None] > ends, -torch.inf)


def span_logs(scores: Tensor, span_tokens: int) -> Tensor:
    """Log of the summed exponentials of each span's scores: ``[..., n] -> [..., n_spans]``; the last may be shorter."""
    n_spans, rest = divmod(scores.shape[-1], span_tokens)
    whole = scores[..., : n_spans * span_tokens].unflatten(-1, (n_spans, span_tokens)).logsumexp(-1)
    return torch.cat((whole, scores[..., -rest:].logsumexp(-1, keepdim=True)), -1) if rest else whole
