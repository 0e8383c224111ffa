"""A plan: whether a model fits a card, how fast it can be there, what restoring saves, and what would fit."""

from typing import Any

import msgspec

from cache_store.layout import KVType
from service.engine.ledger import GIB, Ledger
from service.planning.cards import FIRST_BF16, FIRST_EXL2, FIRST_TRITON, Card
from service.planning.conversion import Conversion, conversion_for
from service.planning.estimates import (
    CPU_SHARE,
    DISK_GBPS,
    OBJECT_GBPS,
    PREFILL_SHARE,
    REDIS_GBPS,
    Bound,
    Prefill,
    Reading,
    Restore,
    bounds,
    prefill,
    restore,
)
from service.planning.ledgers import plan_ledger, read_nbytes, step_nbytes
from service.planning.llama import as_file, file_notes, file_refusals, missing_nbytes
from service.planning.model import ModelFacts
from service.planning.request import Wanted, codes_nbytes, layout_of
from service.planning.search import Setting, settings_that_fit


class KVSize(msgspec.Struct, frozen=True):
    """Bytes of a token: `codes` alone, as `stored` with scales (on disk and on a card), and as a step `reads` them."""

    codes: int
    stored: int
    reads: int


class Plan(msgspec.Struct, frozen=True):
    """`problems` say why it does not fit or is not served, most important first; there are none if it `fits`.
    `conversion`: what makes the model of the first of the `settings`, where its weights are not quantized yet."""

    model: dict[str, Any]
    card: dict[str, Any]
    wanted: dict[str, Any]
    fits: bool
    problems: list[str]
    notes: list[str]
    ledger: dict[str, Any]
    kv_bytes_per_token: KVSize
    weights_nbytes: int
    step_weights_nbytes: int
    snapshot_nbytes: int
    resident_nbytes: int
    bounds: list[Bound]
    prefill: Prefill
    restore: list[Restore]
    settings: list[Setting]
    conversion: Conversion | None = None


def make_plan(model: ModelFacts, card: Card, wanted: Wanted) -> tuple[Plan, Ledger]:
    """The plan, and its ledger. Nothing is loaded or allocated."""
    if wanted.by_llama:
        model = as_file(model)
    layout = layout_of(model.shape, wanted.kv_type)
    ledger = plan_ledger(model, card, wanted)
    row, step = read_nbytes(model, card, wanted), step_nbytes(model, card, wanted)
    reading = Reading(step, row, wanted.rows if wanted.is_windowed else None)
    snapshot = layout.bytes_per_token * wanted.context
    share = CPU_SHARE if card.is_cpu else PREFILL_SHARE
    reads = prefill(model.shape, model.layer_parameters, card.fp16_tflops, share, wanted.context)
    settings = settings_that_fit(model, card, wanted)
    missing = missing_nbytes(model, card, wanted) if wanted.by_llama else _missing_nbytes(ledger, wanted)
    problems = [*_refusals(model, card, wanted), *_shortage(ledger, wanted, missing)]
    plan = Plan(
        model=_model(model),
        card=_card(card, wanted),
        wanted=_wanted(wanted),
        fits=not problems,
        problems=problems,
        notes=[*model.notes, *(file_notes(model, card, wanted, ledger) if wanted.by_llama else _notes(model, card))],
        ledger=_ledger(ledger),
        kv_bytes_per_token=KVSize(round(_codes(model, wanted.kv_type)), layout.bytes_per_token, row),
        weights_nbytes=model.weights_nbytes,
        step_weights_nbytes=step,
        snapshot_nbytes=snapshot,
        resident_nbytes=wanted.rows * row,
        bounds=bounds(card.bandwidth_gbps, reading, wanted.users, wanted.documents),
        prefill=reads,
        restore=_restores(card, wanted, layout.bytes_per_token * wanted.rows, reads.seconds),
        settings=settings,
        conversion=None if card.is_cpu or wanted.by_llama else conversion_for(model, settings),
    )
    return plan, ledger


def _codes(model: ModelFacts, kv_type: KVType) -> float:
    return (codes_nbytes(model.shape, kv_type.key_bits) + codes_nbytes(model.shape, kv_type.value_bits)) / 2


def not_computed(model: ModelFacts, card: Card, wanted: Wanted) -> list[str]:
    """Why this engine computes neither these models nor others of their kind here, whatever they are asked for."""
    refusals = file_refusals if wanted.by_llama else _engine_refusals
    return [*_not_served(model, card), *refusals(model, card, wanted)]


def _refusals(model: ModelFacts, card: Card, wanted: Wanted) -> list[str]:
    """What no memory would change."""
    found = not_computed(model, card, wanted)
    if model.allowed_kv is not None and wanted.kv_type != KVType.FP16 and wanted.kv_type not in model.allowed_kv:
        found.append(
            f"the KV type {wanted.kv_type} was not measured or is refused for this model; allowed are "
            f"{', '.join([KVType.FP16, *model.allowed_kv])}"
        )
    if 0 < model.max_context < wanted.context and not wanted.is_windowed:
        instead = "is too long for it" if wanted.by_llama else "has to be windowed (--window, or --retention small)"
        found.append(f"the model's context is {model.max_context:,} tokens: a document of {wanted.context:,} {instead}")
    return found


def _engine_refusals(model: ModelFacts, card: Card, wanted: Wanted) -> list[str]:
    """Of the torch engine, or of the exl2 engine."""
    found = []
    if wanted.draft is not None:
        found += _draft_refusals(card, wanted.draft)
    if card.capability is not None and card.capability < FIRST_EXL2:
        found.append(
            f"the exl2 engine needs sm_70 or newer, and {card.name} is of {card.architecture}: serve a GGUF by "
            "llama.cpp (--engine llamacpp)"
        )
    if card.is_cpu and model.is_quantized:
        found.append(f"{model.label} weights need an NVIDIA card: the torch engine reads plain ones only")
    if wanted.is_windowed and not model.index_heads:
        found.append(f"windowed documents need index heads: run `preread models index-heads {model.name}`")
    return found


def _not_served(model: ModelFacts, card: Card) -> list[str]:
    return [*model.problems, *(() if card.is_cpu else model.card_problems)]


def _draft_refusals(card: Card, draft: ModelFacts) -> list[str]:
    found = [f"the draft model {draft.name}: {problem}" for problem in _not_served(draft, card)]
    if card.is_cpu and draft.is_quantized:
        found.append(f"the draft model {draft.name}: {draft.label} weights need an NVIDIA card")
    return found


def _missing_nbytes(ledger: Ledger, wanted: Wanted) -> int:
    return -(-(wanted.room_tokens - ledger.pool_tokens) // ledger.block_tokens) * ledger.block_nbytes


def _shortage(ledger: Ledger, wanted: Wanted, missing_nbytes: int) -> list[str]:
    if (missing := ledger.overdrawn_nbytes) > 0:
        return [f"the model does not fit the {ledger.place}: {missing / GIB:.2f} GiB are missing before any document"]
    if ledger.pool_tokens >= wanted.room_tokens:
        return []
    fit = f"{wanted.room_tokens:,} tokens of documents do not fit, only {ledger.pool_tokens:,}"
    return [f"{fit}: {missing_nbytes / GIB:.2f} GiB are missing"]


def _notes(model: ModelFacts, card: Card) -> list[str]:
    found = []
    if card.capability is not None and FIRST_EXL2 <= card.capability < FIRST_TRITON:
        found.append(
            f"on {card.architecture} attention is plain torch (no Triton kernels below sm_80), which expands the "
            "quantized cache: at long context expect less than the bound, which is what the memory allows"
        )
    if card.capability is not None and card.capability < FIRST_BF16:
        found.append(f"{card.name} has neither BF16 nor FP8: everything is computed in FP16")
    if card.key == "other":
        found.append(f"{card.name} is not in the table: prefill is guessed")
    if model.kind == "dimensions":
        found.append("from dimensions: the weights are taken to be read whole in every step")
    return found


def _restores(card: Card, wanted: Wanted, nbytes: int, recompute_s: float) -> list[Restore]:
    tiers = [] if card.is_cpu or wanted.by_llama else [("host", card.host_gbps, False)]
    tiers.append(("disk", wanted.disk_gbps or DISK_GBPS, bool(wanted.disk_gbps)))
    tiers += [("redis", REDIS_GBPS, False), ("object", OBJECT_GBPS, False)]
    return [restore(tier, gbps, measured, nbytes, recompute_s) for tier, gbps, measured in tiers]


def _model(model: ModelFacts) -> dict[str, Any]:
    shape = model.shape
    return {
        "name": model.name, "kind": model.kind, "weights": model.label, "n_parameters": model.n_parameters,
        "bits_per_weight": round(model.bits, 3), "layers": shape.n_layers, "kv_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim, "heads": shape.n_heads, "hidden": shape.hidden,
        "intermediate": shape.intermediate, "vocab": shape.vocab, "max_context": model.max_context,
    }  # fmt: skip


def _card(card: Card, wanted: Wanted) -> dict[str, Any]:
    kernels = "torch" if card.capability is None or card.capability < FIRST_TRITON else "triton"
    return {
        "name": card.name, "key": card.key, "memory_nbytes": card.memory_nbytes, "free_nbytes": card.free_nbytes,
        "bandwidth_gbps": card.bandwidth_gbps, "architecture": card.architecture, "dtypes": card.dtypes,
        "engine": "llamacpp" if wanted.by_llama else "torch" if card.is_cpu else "exl2",
        "kernels": "llama.cpp" if wanted.by_llama else kernels,
    }  # fmt: skip


def _wanted(wanted: Wanted) -> dict[str, Any]:
    return {
        "context": wanted.context, "kv_type": str(wanted.kv_type), "users": wanted.users,
        "documents": wanted.documents, "rows": wanted.rows, "windowed": wanted.is_windowed,
        "retention": None if wanted.kept is None else msgspec.to_builtins(wanted.kept),
        "draft_model": None if wanted.draft is None else wanted.draft.name,
    }  # fmt: skip


def _ledger(ledger: Ledger) -> dict[str, Any]:
    return {
        "lines": [{"name": line.name, "nbytes": line.nbytes, "phase": line.phase} for line in ledger.lines],
        "announced_nbytes": ledger.announced_nbytes,
        "total_nbytes": ledger.memory.total,
        "document_tokens": ledger.pool_tokens,
    }
