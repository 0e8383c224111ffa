"""What computing takes on a card beside weights and KV: exllamav2's scratch and the largest work in flight.

Each formula names the code it follows, so that a line of the ledger that is off can be traced to it.
"""

from dataclasses import dataclass
from typing import Any

from service.engine.exl2_engine.footprint import Footprint

_HALF = 2
_FP32 = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model that decide what its computation needs."""

    hidden: int
    intermediate: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Shape":
        """Of a `config.json` whose sizes were checked (`models.configs.read_config`)."""
        n_heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            n_layers=config["num_hidden_layers"],
            n_heads=n_heads,
            n_kv_heads=config.get("num_key_value_heads") or n_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // n_heads,
            vocab=config["vocab_size"],
        )

    @property
    def query_width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim


def exllama_scratch(shape: Shape, footprint: Footprint, max_input_len: int, max_dq_elements: int) -> int:
    """The one buffer that exllamav2's quantized modules share: the largest need of any of them.

    `set_device_map` with `scratch_space_fixed` of attention, MLP and head: FP16 copies of up to `max_dq_elements`
    weights, and the states of `max_input_len` tokens. Unquantized layers need none.
    """
    if not footprint.quantized:
        return 0
    dq = _HALF * min(footprint.largest_matrix, max_dq_elements)
    attention = _HALF * max_input_len * max(shape.query_width, shape.hidden) + 128 + dq
    widest = max(shape.hidden, shape.intermediate)
    mlp = _HALF * max_input_len * (shape.hidden + 2 * widest) + 3 * 128 + dq
    head = _HALF * min(footprint.head_matrix or _padded(shape.vocab) * shape.hidden, max_dq_elements)
    return max(attention, mlp, head)


def _padded(n: int) -> int:
    return -(-n // 32) * 32


def rope_table(max_seq_len: int, head_dim: int) -> int:
    """exllamav2's own tables of sines and cosines, made also when ours are used."""
    return 2 * max_seq_len * head_dim * _HALF


def prefill_work(shape: Shape, quantized: bool, n: int) -> int:
    """The most that one document chunk of `n` tokens holds at a time (`Exl2Runner._prefill`): the states and, of a
    layer, the larger of what attention and the MLP need.

    Attention (`prefill_attention`): queries, keys and values, transformed; the queries again with heads first, keys
    and values repeated for every query head, two FP16 partial outputs, the merged one in FP32, the output. MLP: see
    `mlp_work`.
    """
    states = _HALF * n * shape.hidden
    before = _HALF * 2 * n * (shape.query_width + 2 * shape.kv_width) + states
    attention = _HALF * n * (shape.query_width + 2 * shape.kv_width)
    attention += n * shape.query_width * (6 * _HALF + _FP32) + 3 * _FP32 * n * shape.n_heads
    return states + max(before, attention, mlp_work(shape, quantized, n))


def past_piece(shape: Shape, piece_tokens: int) -> int:
    """Keys and values of a piece of the past, decoded to FP16. All layers share it."""
    return _HALF * 2 * piece_tokens * shape.kv_width


def replay_work(shape: Shape, quantized: bool, n: int, n_scores: int, block_tokens: int) -> int:
    """The most that a repetition of a chunk of `n` tokens behind a block of sinks holds at a time (`replay.Replay`):
    what is seen of the document, its keys again with more dims, the scores found, and the larger of what prefill needs
    and one product of `n_scores` scores with its queries."""
    seen = _HALF * 2 * (n + 2 * block_tokens) * shape.kv_width
    seen += _HALF * n * (shape.kv_width + 8 * shape.n_kv_heads) + _FP32 * shape.n_layers * shape.n_kv_heads * n
    product = _HALF * (n * (shape.hidden + 3 * shape.query_width + 2 * shape.kv_width + 8 * shape.n_heads) + n_scores)
    return seen + max(prefill_work(shape, quantized, n), product)


def mlp_work(shape: Shape, quantized: bool, n: int) -> int:
    """Of `n` rows: the normed states, both intermediates, one of them after its gate, their product. exllamav2's
    quantized MLP has all of that in its scratch."""
    return 0 if quantized else _HALF * n * (2 * shape.hidden + 4 * shape.intermediate)


def step_work(shape: Shape, quantized: bool, rows: int, parts: int) -> int:
    """The most that a forward of sequences' rows holds at a time: states, queries, keys and values, and `parts`
    partial results in FP32 with their log-sum-exps (`kernels.attend`)."""
    states = _HALF * 2 * rows * shape.hidden
    attention = _HALF * rows * (3 * shape.query_width + 2 * shape.kv_width)
    attention += _FP32 * rows * parts * (shape.query_width + shape.n_heads)
    return states + max(attention, mlp_work(shape, quantized, rows))


def logits_work(shape: Shape, rows: int) -> int:
    """Logits in FP16, padded as the head is, and in FP32."""
    return rows * (_HALF * _padded(shape.vocab) + _FP32 * shape.vocab)
