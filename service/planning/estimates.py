"""How fast it can be: what memory allows for decode, what products take for prefill, and which tier is worth it."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from service.engine.exl2_engine.scratch import Shape

CONTEXTS = (0, 8192, 32_768, 131_072, 262_144)
PREFILL_SHARE = 0.4
"""Of a card's FP16 products that prefill reaches: measured on the H200 with the 27B-shaped model at 8K tokens."""
CPU_SHARE = 0.5
"""Of a processor's FP32 products, as numpy reaches them: measured with the demo model."""
REDIS_GBPS = 0.6
OBJECT_GBPS = 0.1
DISK_GBPS = 1.2
"""Of tiers nobody measured here: what docs/tiers.md and docs/performance.md report."""


class Bound(msgspec.Struct, frozen=True):
    """At `context` tokens of document: rows read, bytes of a step, most tokens a second of one user and of all."""

    context: int
    rows: int
    nbytes: int
    tok_s: float
    total_tok_s: float


class Restore(msgspec.Struct, frozen=True):
    """Bringing a document's KV back from a tier against computing it again. `measured`: the speed is of this machine.
    Below `break_even_gbps` computing is faster."""

    tier: str
    gbps: float
    measured: bool
    seconds: float
    recompute_s: float
    times_faster: float
    break_even_gbps: float
    pays: bool


class Prefill(msgspec.Struct, frozen=True):
    """Reading a document of `tokens`, once; an estimate."""

    tokens: int
    tok_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Reading:
    """What a step reads: weights, and of each row of a document so many bytes; rows that are resident at most."""

    step_nbytes: int
    row_nbytes: int
    most_rows: int | None = None

    def rows(self, context: int) -> int:
        return context if self.most_rows is None else min(context, self.most_rows)

    def nbytes(self, context: int, documents: int = 1) -> int:
        return self.step_nbytes + documents * self.rows(context) * self.row_nbytes


def bandwidth_bound(bandwidth_gbps: float, nbytes: float) -> float:
    """Steps a second: bandwidth over bytes read. One step gives each user a token."""
    return bandwidth_gbps * 1e9 / nbytes


def bounds(
    bandwidth_gbps: float, reading: Reading, users: int, documents: int, contexts: Sequence[int] = CONTEXTS
) -> list[Bound]:
    """The bound at each length. Users of one document share one read of it."""
    found = []
    for context in contexts:
        nbytes = reading.nbytes(context, documents)
        steps = bandwidth_bound(bandwidth_gbps, nbytes)
        found.append(Bound(context, reading.rows(context), nbytes, steps, users * steps))
    return found


def prefill(shape: Shape, layer_parameters: int, tflops: float, share: float, tokens: int) -> Prefill:
    """Two operations a weight and token, and causal attention over what was read before."""
    operations = 2.0 * layer_parameters * tokens + 2.0 * shape.n_layers * shape.query_width * tokens**2
    seconds = operations / (share * tflops * 1e12)
    return Prefill(tokens, tokens / seconds if seconds else 0.0, seconds)


def restore(tier: str, gbps: float, measured: bool, nbytes: int, recompute_s: float) -> Restore:
    """`nbytes` from a tier of `gbps` against `recompute_s` seconds of prefill."""
    seconds = nbytes / (gbps * 1e9)
    return Restore(
        tier, gbps, measured, seconds, recompute_s, recompute_s / seconds if seconds else 0.0,
        nbytes / recompute_s / 1e9 if recompute_s else 0.0, seconds < recompute_s,
    )  # fmt: skip
