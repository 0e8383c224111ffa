"""The KL gate: how far a KV type moves a model's next-token predictions from those of FP16 KV.

The path is the one that serves: the first part of the bundled text is prefilled as a document in the KV type
(each chunk attends to the stored form of those before it), the rest is fed as a question's rows, and the
distributions at every row are compared with the FP16 run's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch

from cache_store.layout import KVType
from service.engine.models.card import MEAN_KL_LIMIT, KVGate, ModelCard
from service.engine.models.source import Progress, silent
from service.engine.protocol import Rows, Runner
from service.engine.tokenizer import Tokenizer

MakeRunner = Callable[[KVType], Runner]

_ROWS_AT_ONCE = 128
_DOCUMENT_SHARE = 3 / 4


@dataclass(frozen=True, slots=True)
class KLStats:
    """Kullback-Leibler divergence (nats) of next-token distributions, over positions."""

    mean: float
    p99: float
    top1_agreement: float
    n_positions: int


def kl_stats(reference_logits: torch.Tensor, logits: torch.Tensor) -> KLStats:
    """KL(reference || other) at every position of two ``[positions, vocab]`` tensors of float32 logits.

    Raises ValueError on different or empty shapes, or when a value is not finite.
    """
    if reference_logits.shape != logits.shape or reference_logits.dim() != 2 or not len(logits):
        raise ValueError(f"logits of shapes {tuple(reference_logits.shape)} and {tuple(logits.shape)} do not compare")
    parts = zip(reference_logits.split(_ROWS_AT_ONCE), logits.split(_ROWS_AT_ONCE), strict=True)
    divergences = torch.cat([_kl_rows(reference, other) for reference, other in parts])
    if not torch.isfinite(divergences).all():
        raise ValueError("the logits hold values that are not finite")
    same = (reference_logits.argmax(-1) == logits.argmax(-1)).double().mean()
    p99 = divergences.quantile(0.99)
    return KLStats(float(divergences.mean()), float(p99), float(same), len(divergences))


def _kl_rows(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    p, q = reference.float().log_softmax(-1), other.float().log_softmax(-1)
    # rounding can make a divergence of equal distributions slightly negative
    return (p.exp() * (p - q)).sum(-1, dtype=torch.float64).clamp_min(0)


def gate_text() -> str:
    """The bundled English text with names, numbers and codes, 1,400 to 1,900 tokens."""
    return files("service.engine.models").joinpath("gate_text.txt").read_text("utf-8")


def gate_ids(model_dir: Path, card: ModelCard) -> list[int]:
    """The bundled text behind the model's own prompt, cut to its context."""
    tokenizer = Tokenizer.load(model_dir)
    ids = tokenizer.encode_template(card.prompt.document_prefix) + tokenizer.encode_plain(gate_text())
    return ids[: card.max_context]


def measure_kv_types(
    make_runner: MakeRunner,
    token_ids: Sequence[int],
    kv_types: Sequence[KVType] = (KVType.K8V8, KVType.K8V4, KVType.K4V4),
    progress: Progress = silent,
) -> dict[str, KVGate]:
    """KV type -> KL against FP16 KV over `token_ids`, and whether it is allowed.

    `make_runner` gives the same model in a KV type; one runner exists at a time.
    """
    progress("measuring", 0, len(kv_types) + 1)
    n_document = int(len(token_ids) * _DOCUMENT_SHARE)
    reference = continuation_logits(make_runner(KVType.FP16), token_ids, n_document)
    gates: dict[str, KVGate] = {}
    for done, kv_type in enumerate(kv_types, 1):
        progress("measuring", done, len(kv_types) + 1)
        gates[kv_type.value] = _verdict(
            kl_stats(reference, continuation_logits(make_runner(kv_type), token_ids, n_document))
        )
    progress("measuring", len(kv_types) + 1, len(kv_types) + 1)
    return gates


def _verdict(stats: KLStats) -> KVGate:
    return KVGate(
        mean_kl=stats.mean,
        p99_kl=stats.p99,
        top1_agreement=stats.top1_agreement,
        allowed=stats.mean <= MEAN_KL_LIMIT,
    )


def continuation_logits(runner: Runner, token_ids: Sequence[int], n_document: int) -> torch.Tensor:
    """Logits ``[len(token_ids) - n_document + 1, vocab]`` (float32) after the document's last token and each
    later one.

    The first `n_document` tokens are prefilled as a document.
    """
    document = runner.new_document(n_document)
    for first in range(0, n_document, runner.limits.chunk_tokens):
        runner.prefill_chunk(document, token_ids[first : min(first + runner.limits.chunk_tokens, n_document)])
    try:
        return logits_after(runner, document, token_ids[n_document - 1 :])
    finally:
        runner.free_document(document)


def logits_after(runner: Runner, document: object, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after each of `tokens`, the first of which is the last token of a complete `document`."""
    slot = runner.new_tail()
    try:
        rows = [
            runner.forward([Rows(slot, document, tokens[i : i + _ROWS_AT_ONCE], refeed=i == 0)])[0]
            for i in range(0, len(tokens), _ROWS_AT_ONCE)
        ]
    finally:
        runner.free_tail(slot)
    return torch.cat(rows)
