"""What of a windowed document is resident: the rows ``[sinks | window]``, and summary slots of each head's own."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache_store.keys import SnapshotKey
from cache_store.segments import Segments
from service.engine.digests import digest_of
from service.engine.messages import DocumentRef, Retention
from service.engine.protocol import Runner, RunnerLimits

KEPT_VERSION = 3
"""Of how slots are chosen: answers over other slots are other answers, and their KV is of no use."""

QUESTION_GAP = 256
"""Positions left free between the slots of several segments and a question. Slots of every segment share the places
before it, and right behind them the demo model repeats a question instead of answering it: over 19,700 tokens in ten
segments and 1,024 slots none of five questions was answered without the gap, all five with it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The rows that a retention leaves of a document of `n_tokens` tokens. Sinks and window are the same tokens in
    every head. `slots` are tokens between them: so many of a head in the mean, in every head of every layer another
    number of others."""

    n_tokens: int
    sinks: int
    slots: int
    window: int
    segments: Segments

    @classmethod
    def of(cls, n_tokens: int, retention: Retention, *, has_slots: bool) -> "Kept":
        """Clips what `retention` wishes to what there is; the last token always stays. Where it would keep every token,
        all are rows. Without `has_slots` the engine has none, and its `summary_tokens` count as 0."""
        sinks = min(retention.sink_tokens, n_tokens - 1)
        window = min(max(retention.window_tokens, 1), n_tokens - sinks)
        slots = retention.summary_tokens if has_slots else 0
        if sinks + retention.summary_tokens + window >= n_tokens:
            slots, window = 0, n_tokens - sinks
        return cls(n_tokens, sinks, slots, window, segments_of(n_tokens, retention))

    @property
    def n_rows(self) -> int:
        """Rows that all heads share."""
        return self.sinks + self.window

    @property
    def n_resident(self) -> int:
        """Rows of a head in the mean, its slots included."""
        return self.n_rows + self.slots

    @property
    def middle(self) -> tuple[int, int]:
        """The tokens [first, last) that are neither sinks nor window."""
        return self.sinks, self.n_tokens - self.window

    @property
    def is_whole(self) -> bool:
        """Whether every token of the document is resident in every head."""
        return self.n_rows == self.n_tokens

    @property
    def verbatim(self) -> list[tuple[int, int]]:
        """The tokens, as ranges [first, last), that are resident in every head."""
        first, last = self.middle
        return [(0, self.n_tokens)] if self.is_whole else [(0, first), (last, self.n_tokens)]

    @property
    def next_position(self) -> int:
        is_cut = self.segments.n_segments(self.n_tokens) > 1
        return self.segments.next_position(self.n_tokens) + QUESTION_GAP * (is_cut and self.slots > 0)

    @property
    def last_position(self) -> int:
        return self.segments.last_position(self.n_tokens)

    def digest(self, token_digest: str) -> str:
        """Names these rows of the document whose tokens `token_digest` names."""
        of_segments = self.segments.segment_tokens, self.segments.sink_tokens
        parts = (KEPT_VERSION, self.sinks, self.slots, self.window, *of_segments)
        return digest_of([*token_digest.encode(), *parts])

    def row_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """A token id for each row."""
        first, last = self.middle
        return [*token_ids[:first], *token_ids[last:]]

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The token of each row, ``[n_rows]``."""
        first, last = self.middle
        return np.concatenate((np.arange(first), np.arange(last, self.n_tokens)))


@dataclass(frozen=True, slots=True)
class Subject:
    """A document of known tokens, and what of it is resident: all of it when `kept` is None. `n_slot_rows`: slots of
    all heads of all layers together. `kind`: of its snapshot of all tokens, "draft" for that of a draft model."""

    ref: DocumentRef
    token_digest: str
    n_tokens: int
    kept: Kept | None = None
    n_slot_rows: int = 0
    kind: str = "document"

    @classmethod
    def of(
        cls, runner: Runner, ref: DocumentRef, token_digest: str, n_tokens: int, retention: Retention | None
    ) -> "Subject":
        """Of a document that `runner` is to serve."""
        if retention is None:
            return cls(ref, token_digest, n_tokens)
        kept = Kept.of(n_tokens, retention, has_slots=runner.limits.ragged_slots)
        n_heads = runner.layout.n_layers * runner.layout.n_kv_heads
        return cls(ref, token_digest, n_tokens, kept, n_heads * kept.slots)

    @property
    def segments(self) -> Segments:
        return Segments() if self.kept is None else self.kept.segments

    @property
    def n_rows(self) -> int:
        """Rows in memory that all heads share."""
        return self.n_tokens if self.kept is None else self.kept.n_rows

    @property
    def n_resident(self) -> int:
        """Rows of a head in memory, in the mean."""
        return self.n_tokens if self.kept is None else self.kept.n_resident

    @property
    def digest(self) -> str:
        """Names these rows."""
        return self.token_digest if self.kept is None else self.kept.digest(self.token_digest)

    @property
    def next_position(self) -> int:
        return self.n_tokens if self.kept is None else self.kept.next_position

    @property
    def full_key(self) -> SnapshotKey:
        """Of the snapshot of all tokens: the cold one of a windowed document."""
        return SnapshotKey(self.ref.owner_id, self.kind, self.ref.document_id)

    @property
    def key(self) -> SnapshotKey:
        """Of the snapshot of what is resident, without slots."""
        return self.full_key if self.kept is None else self.full_key.of_kind("resident")

    @property
    def slots_key(self) -> SnapshotKey:
        """Of the snapshot of the slots."""
        return self.full_key.of_kind("slots")

    @property
    def scratch(self) -> DocumentRef:
        return scratch_ref(self.ref)


_SCRATCH = "/scratch"


def scratch_ref(ref: DocumentRef) -> DocumentRef:
    """Under which name a document of the runner that holds one segment after another is counted."""
    return DocumentRef(ref.owner_id, ref.document_id + _SCRATCH)


_TOGETHER = "/together"


def together_ref(refs: Sequence[DocumentRef]) -> DocumentRef:
    """Under which name rows of several documents, in one document of the runner, are counted."""
    return DocumentRef(refs[0].owner_id, "+".join(ref.document_id for ref in refs) + _TOGETHER)


def holds(ref: DocumentRef, document: DocumentRef) -> bool:
    """Whether what is counted as `ref` has rows of `document`."""
    return document in documents_of(ref)


def documents_of(ref: DocumentRef) -> list[DocumentRef]:
    """The documents that have rows in what is counted as `ref`."""
    *names, last = ref.document_id.split("+")
    names.append(last.removesuffix(_TOGETHER).removesuffix(_SCRATCH))
    return [DocumentRef(ref.owner_id, name) for name in names]


def segments_of(n_tokens: int, retention: Retention) -> Segments:
    """How a document of `n_tokens` tokens is cut; a single segment is none, however it was asked for."""
    return Segments(retention.segment_tokens, retention.sink_tokens).of_length(n_tokens)


def check_retention(retention: Retention, limits: RunnerLimits) -> None:
    """Raises ValueError for negative numbers, and for sinks behind which the runner can begin no segment."""
    parts = retention.sink_tokens, retention.summary_tokens, retention.window_tokens, retention.fetch_tokens
    if min(parts) < 0:
        raise ValueError("no part of a retention is negative")
    if retention.segment_tokens and retention.sink_tokens % limits.sink_multiple:
        raise ValueError(f"{retention.sink_tokens} sinks are no multiple of {limits.sink_multiple}")
