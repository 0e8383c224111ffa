"""What a plan is asked for, and the numbers that follow from it alone."""

from dataclasses import dataclass

from cache_store.layout import KVLayout, KVType
from service.core.wishes import FULL, PRESETS, Kept, Wish
from service.engine.exl2_engine.scratch import Shape
from service.planning.model import ModelFacts

GIB = 1 << 30
IDLE_TAILS = 4
PROBE_TAILS = 1
BLOCK = 256
SEGMENT_TOKENS = 2048
INDEX_NBYTES = 512 << 20
"""Of a card, for the indexes of windowed documents (`EngineConfig.index_budget_nbytes`)."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """`context`: tokens of a document; `users` ask at once, about `documents` different ones; `kept` None keeps whole
    documents. `tail_tokens`: of turns that a session comes to have. `disk_gbps`: 0 is not known.
    `by_llama`: the llamacpp engine serves it. `guesses`: whether steps have guessed tokens too. `draft`: a model that
    guesses, of which as many tokens are kept.
    """

    context: int = 32_768
    kv_type: KVType = KVType.K8V4
    kept: Kept | None = None
    users: int = 1
    documents: int = 1
    reserve_nbytes: int = GIB
    tail_tokens: int = 2048
    resident_nbytes: int = 2 * GIB
    compute: str = "float32"
    disk_gbps: float = 0.0
    by_llama: bool = False
    guesses: bool = True
    draft: ModelFacts | None = None

    @property
    def n_slots(self) -> int:
        """Tails that the engine makes room for, as the service starts it."""
        return self.users + IDLE_TAILS + PROBE_TAILS

    @property
    def draft_slots(self) -> int:
        """Tails of a draft model, which keeps no turns."""
        return self.users + PROBE_TAILS

    @property
    def rows(self) -> int:
        """Rows of one document that stay in memory, beside those that a question fetches."""
        if self.kept is None or self.context <= self.kept.n_tokens:
            return self.context
        return _blocks(self.kept.sink_tokens) + self.kept.summary_tokens + self.kept.window_tokens

    @property
    def is_windowed(self) -> bool:
        return self.rows < self.context

    @property
    def room_tokens(self) -> int:
        """Rows that have to fit: those of all documents, and while a windowed one is read a segment of it."""
        building = _blocks(self.kept.sink_tokens) + SEGMENT_TOKENS if self.kept and self.is_windowed else 0
        rows = _blocks(self.rows)
        return max(self.documents * rows, (self.documents - 1) * rows + building)


def _blocks(n_tokens: int) -> int:
    return -(-n_tokens // BLOCK) * BLOCK


def kept_of(wish: Wish, window_tokens: int = 0, summary_tokens: int = 0) -> Kept | None:
    """What stays of a document: of `window_tokens` when they are given, else as the wish says; None is all of it."""
    if window_tokens:
        return Kept(PRESETS["small"].sink_tokens, summary_tokens, window_tokens)
    return None if wish.preset == FULL else wish.kept


def codes_nbytes(shape: Shape, bits: float) -> float:
    """Bytes of a token's keys and values at so many bits each, without scales: 2 x layers x KV heads x head dim."""
    return 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * bits / 8


def layout_of(shape: Shape, kv_type: KVType) -> KVLayout:
    """The byte layout of a model's KV in a KV type."""
    return KVLayout(shape.n_layers, shape.n_kv_heads, shape.head_dim, kv_type)
