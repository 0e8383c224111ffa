"""The index of a document: the keys of the model's index heads for all of its tokens, resident as they are stored.

Index heads are retrieval heads: their attention goes to the place that answers the question (`index_heads.py` finds
them). So a question's attention over *all* keys of these few heads says which tokens to bring back, at some hundred
bytes of memory per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache_store.layout import GROUP, KVLayout, packed_nbytes
from service.engine.watch.masses import span_logs

SPAN_TOKENS = 16
"""Spans are counted from a document's first token. A segment is a multiple of 256 tokens: no span crosses its end."""
CANDIDATES = 64
"""Spans of which is said what each row of a question gives them: more than any budget holds."""
POWER = 0.7
"""Of a row's probability of a span: see `figures_of_head`."""
_PIECE = 1 << 21  # scores, or masses, computed at a time: memory stays bounded whatever the lengths
_SLICE_TOKENS = 8192  # scored at a time by a processor, whose caches hold that many keys


class KeyIndex:
    """Keys of `heads`, pairs of layer and KV head, for `n_tokens` tokens. Empty at first; `add` fills it, in host
    memory; `move_to` takes it to the device that scores.

    Scores are those of attention in FP32 over the decoded keys, in the space that the KV type stores.
    """

    def __init__(self, layout: KVLayout, n_tokens: int, heads: Sequence[tuple[int, int]]) -> None:
        for layer, head in heads:
            if not (0 <= layer < layout.n_layers and 0 <= head < layout.n_kv_heads):
                raise ValueError(f"the model has no KV head {head} in a layer {layer}")
        self.heads = tuple(heads)
        self.n_tokens = n_tokens
        self._layout = layout
        code_nbytes, scale_nbytes = packed_nbytes(layout.kv_type.key_bits, layout.head_dim)
        self._codes = torch.zeros(len(heads), n_tokens, code_nbytes, dtype=torch.uint8)
        self._scales = torch.zeros(len(heads), n_tokens, scale_nbytes, dtype=torch.uint8)

    @property
    def layers(self) -> list[int]:
        """Layers that have an index head, each once, in order: those whose records `add` wants."""
        return sorted({layer for layer, _ in self.heads})

    @property
    def nbytes(self) -> int:
        """Bytes of the keys in memory."""
        return self._codes.nbytes + self._scales.nbytes

    @property
    def device(self) -> torch.device:
        """Where the keys lie, and scores are computed."""
        return self._codes.device

    def move_to(self, device: torch.device) -> None:
        """Keep and score the keys on a device from now on; only for the thread that computes on it. Nothing can be
        added behind it."""
        self._codes, self._scales = self._codes.to(device), self._scales.to(device)

    def add(self, layer: int, first_token: int, records: memoryview, n_tokens: int) -> None:
        """Take the keys out of consecutive records of one layer that hold the tokens from `first_token` on.

        The records are whole blocks, the last may be partial. Raises ValueError when they have another size, or reach
        beyond the document.
        """
        lengths = self._layout.block_lengths(n_tokens)
        if records.nbytes != sum(map(self._layout.record_nbytes, lengths)):
            raise ValueError(f"{n_tokens} tokens do not take {records.nbytes} bytes of records")
        if first_token + n_tokens > self.n_tokens:
            raise ValueError(
                f"tokens {first_token} to {first_token + n_tokens} are not in a document of {self.n_tokens}"
            )
        data = torch.frombuffer(bytearray(records) if records.readonly else records, dtype=torch.uint8)
        places = [(place, head) for place, (of_layer, head) in enumerate(self.heads) if of_layer == layer]
        at = 0
        for length in lengths:
            record = data[at : at + self._layout.record_nbytes(length)]
            for place, head in places:
                self._take(place, head, record, first_token, length)
            at, first_token = at + len(record), first_token + length

    def _take(self, place: int, head: int, record: Tensor, first_token: int, n_tokens: int) -> None:
        k_codes, k_scales, _, _ = self._layout.part_nbytes(n_tokens)
        tokens = slice(first_token, first_token + n_tokens)
        for kept, part in ((self._codes, record[:k_codes]), (self._scales, record[k_codes : k_codes + k_scales])):
            if part.numel():
                kept[place, tokens] = part.view(self._layout.n_kv_heads, n_tokens, -1)[head]

    def scores(self, queries: Tensor, resident: Sequence[tuple[int, int]] = ()) -> Tensor:
        """How much a question looks at each span: float32 ``[n_spans]`` on the CPU, spans of SPAN_TOKENS (the last is
        shorter).

        `queries`: ``[n_heads, heads per KV head, rows, head_dim]`` as `Runner.question_queries` gives them, of the
        rows that shall count, on any device. Tokens in `resident`, ranges ``[first, last)``, take their share of the
        attention, but do not count for their span. See `figures_of_head` for how rows and heads become one figure.
        Raises ValueError for another shape.
        """
        return looks_among([self], queries, [resident])[0].figures

    @torch.inference_mode()
    def masses(
        self, queries: Tensor, span_tokens: int = SPAN_TOKENS, resident: Sequence[tuple[int, int]] = ()
    ) -> Tensor:
        """Attention probability of each span, exact over all tokens of the document: float32
        ``[n_heads, heads per KV head, rows, n_spans]`` on the CPU. Arguments and errors are those of `scores`."""
        self.check(queries)
        # one head after the other: a long question over a long document would take much memory for all at once
        return torch.stack([self._masses(i, q, span_tokens, resident).cpu() for i, q in enumerate(queries)])

    def check(self, queries: Tensor) -> None:
        """Raises ValueError for queries that are not of these heads."""
        if queries.dim() != 4 or len(queries) != len(self.heads) or queries.shape[-1] != self._layout.head_dim:
            raise ValueError(f"queries of shape {list(queries.shape)} do not fit {len(self.heads)} index heads")

    def _masses(self, place: int, queries: Tensor, span_tokens: int, resident: Sequence[tuple[int, int]]) -> Tensor:
        """``[heads per KV head, rows, n_spans]`` of one head, for its queries."""
        cold, kept = self.span_logs(place, queries, span_tokens, resident)
        return torch.cat((cold, kept), -1).softmax(-1)[..., : cold.shape[-1]]

    def span_logs(
        self, place: int, queries: Tensor, span_tokens: int, resident: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """Of one head, for its queries, the logs of the summed exponentials of the scores: of each span's tokens that
        are not `resident`, ``[heads per KV head, rows, n_spans]``, and of those that are, ``[..., any number]``. They
        are where the keys are."""
        group, rows, head_dim = queries.shape
        q = queries.to(self._codes.device, torch.float32).flatten(0, 1)
        most = _SLICE_TOKENS if self._codes.device.type == "cpu" else _PIECE
        step = max(min(most, _PIECE // max(len(q), head_dim)) // span_tokens, 1) * span_tokens
        cold: list[Tensor] = []
        kept: list[Tensor] = [q.new_empty(len(q), 0)]
        for first in range(0, self.n_tokens, step):
            scores = q @ self.keys(place, slice(first, first + step)).T
            for begin, end in resident:
                part = scores[:, max(begin - first, 0) : max(end - first, 0)]
                if part.shape[1]:
                    kept.append(part.logsumexp(-1, keepdim=True))
                    part.fill_(-torch.inf)
            cold.append(span_logs(scores, span_tokens))
        return torch.cat(cold, -1).view(group, rows, -1), torch.cat(kept, -1).view(group, rows, -1)

    def keys(self, place: int, tokens: slice | Tensor) -> Tensor:
        """Decoded keys of tokens of one head, FP32 ``[n, head_dim]``, rotated where the KV type is."""
        if isinstance(tokens, Tensor):
            tokens = tokens.to(self._codes.device)
        codes = self._codes[place, tokens]
        bits = self._layout.kv_type.key_bits
        if bits == 16:
            return codes.view(torch.float16).to(torch.float32)
        values = (codes.view(torch.int8) if bits == 8 else _unpacked(codes)).to(torch.float32)
        scales = self._scales[place, tokens].view(torch.float16).to(torch.float32)
        values.unflatten(-1, (scales.shape[-1], GROUP)).mul_(scales[..., None])
        return values


@dataclass(frozen=True, slots=True)
class Look:
    """How much a question looks at the spans of one document, on the CPU.

    `figures`: float32 ``[n_spans]``. `rows`: float32 ``[n_rows, n_places]``, what each row of the question (of each
    query head) gives to the figures of the spans `places`, int64 ``[n_places]``: in sum the figure. The places are the
    best of all documents that were asked together, and so are the rows: the same for each.
    """

    figures: Tensor
    places: Tensor
    rows: Tensor

    @classmethod
    def of(cls, figures: Tensor) -> "Look":
        """One of which only the figures are known."""
        return cls(figures, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0))


@torch.inference_mode()
def looks_among(
    indexes: Sequence[KeyIndex], queries: Tensor, resident: Sequence[Sequence[tuple[int, int]]]
) -> list[Look]:
    """What `KeyIndex.scores` says, for several documents whose tokens share one attention, and which rows say it.

    The indexes are of the same heads, each on any device; `resident` has the ranges of each document. Raises ValueError
    as `scores` does.
    """
    for index in indexes:
        index.check(queries)
    of_heads = [_figures(indexes, place, of_head, resident) for place, of_head in enumerate(queries)]
    sizes = [-(-index.n_tokens // SPAN_TOKENS) for index in indexes]
    figures = torch.stack([of_head for of_head, _ in of_heads]).mean(0).cpu()
    best = figures.topk(min(CANDIDATES, len(figures))).indices
    looks, first = [], 0
    for index, size, ranges, own in zip(indexes, sizes, resident, figures.split(sizes), strict=True):
        places = best[(best >= first) & (best < first + size)] - first
        rows = [_rows(index, i, q, places, of_heads[i][1], ranges) for i, q in enumerate(queries)]
        looks.append(Look(own, places, torch.cat(rows) / max(sum(map(len, rows)), 1)))
        first += size
    return looks


def _figures(
    indexes: Sequence[KeyIndex], place: int, queries: Tensor, resident: Sequence[Sequence[tuple[int, int]]]
) -> tuple[Tensor, Tensor]:
    """Of one head, for the spans of all documents: some rows after the other, as many as `_PIECE` allows. With the logs
    of what each row's attention is divided by, ``[heads per KV head, rows]``."""
    n_spans = sum(-(-index.n_tokens // SPAN_TOKENS) for index in indexes)
    parts = queries.split(max(_PIECE // (len(queries) * n_spans), 1), 1)
    figures, totals = zip(*(_figures_of_part(indexes, place, part, resident) for part in parts), strict=True)
    if len(parts) == 1:
        return figures[0], totals[0]
    shares = torch.tensor([part.shape[1] / queries.shape[1] for part in parts], device=totals[0].device)
    return shares @ torch.stack(figures), torch.cat(totals, 1)


def _figures_of_part(
    indexes: Sequence[KeyIndex], place: int, queries: Tensor, resident: Sequence[Sequence[tuple[int, int]]]
) -> tuple[Tensor, Tensor]:
    masses, totals = _masses_among(indexes, place, queries, resident)
    return figures_of_head(masses), totals


def _masses_among(
    indexes: Sequence[KeyIndex], place: int, queries: Tensor, resident: Sequence[Sequence[tuple[int, int]]]
) -> tuple[Tensor, Tensor]:
    """``[heads per KV head, rows, spans of all documents]`` of one head, and ``[heads per KV head, rows]``, where the
    first index is."""
    logs = [
        index.span_logs(place, queries, SPAN_TOKENS, ranges) for index, ranges in zip(indexes, resident, strict=True)
    ]
    device = logs[0][0].device
    cold, kept = ([part.to(device) for part in parts] for parts in zip(*logs, strict=True))
    together = torch.cat((*cold, *kept), -1)
    return together.softmax(-1)[..., : sum(part.shape[-1] for part in cold)], together.logsumexp(-1)


def _rows(
    index: KeyIndex, place: int, queries: Tensor, places: Tensor, totals: Tensor, resident: Sequence[tuple[int, int]]
) -> Tensor:
    """Of one head, the probability of each of some spans to the power that figures are made with: ``[heads per KV head
    * rows, n_places]`` on the CPU."""
    tokens = (places[:, None] * SPAN_TOKENS + torch.arange(SPAN_TOKENS)).flatten()
    hidden = tokens >= index.n_tokens
    for begin, end in resident:
        hidden |= (tokens >= begin) & (tokens < end)
    keys = index.keys(place, tokens.clamp_max(index.n_tokens - 1))
    device = keys.device
    size, hidden = max(_PIECE // max(len(tokens), 1), 1), hidden.to(device)
    found: list[Tensor] = []
    for q, total in zip(queries.flatten(0, 1).split(size), totals.flatten().split(size), strict=True):
        scores = (q.to(device, torch.float32) @ keys.T).masked_fill_(hidden, -torch.inf)
        logs = scores.unflatten(-1, (len(places), SPAN_TOKENS)).logsumexp(-1)
        found.append((logs - total.to(device)[:, None]).exp().pow(POWER).cpu())
    return torch.cat(found)


def figures_of_head(masses: Tensor) -> Tensor:
    """One figure per span from the probabilities of one head or of several: ``[..., heads per KV head, rows, n_spans]
    -> [..., n_spans]``.

    The mean over rows (and then heads) of the probability to the power of 0.7: a span that several words of the
    question look at counts for more than one that a single word is sure of, and each head errs in its own way.
    docs/recall.md compares it with others.
    """
    return masses.pow(POWER).mean((-3, -2))


def _unpacked(codes: Tensor) -> Tensor:
    """4-bit codes -8 .. 7 as int8, two from each byte, the low one first."""
    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return pairs.view(torch.int8) - 8
