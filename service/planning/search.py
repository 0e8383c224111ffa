"""The best settings that fit: bits of a weight, KV type, and what stays of a document."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from cache_store.layout import KVType
from service.core.wishes import PRESETS, Kept
from service.engine.torch_engine.ledger import ITEMSIZE
from service.planning.cards import Card
from service.planning.estimates import Reading, bandwidth_bound
from service.planning.ledgers import plan_ledger, read_nbytes, step_nbytes
from service.planning.llama import FILE_BITS
from service.planning.model import FP16_BITS, ModelFacts, requantized
from service.planning.request import Wanted

BITS = (8.0, 6.5, 6.0, 5.0, 4.5, 4.25, 4.0, 3.75, 3.5, 3.25, 3.0, 2.75, 2.5)
"""Of a weight, embedding and head included, from the best to what still makes sentences."""
GOOD_BITS = 4.0
"""Below it weights lose more than a smaller KV type does."""
LEAST_BITS = 3.0
"""Below it less of the card is left free instead."""
SMALL_RESERVE = 256 << 20
KV_ORDER = (KVType.K8V8, KVType.K8V4, KVType.K4V4)
WINDOWS = (131_072, 65_536, 32_768, 8192)
SUMMARY_TOKENS = 1024


class Setting(msgspec.Struct, frozen=True):
    """Settings that fit. `retention`: "full", or the tokens that stay: sinks, summary, window. `rows`: of the document
    in memory; `tok_s`: the bound of one user there. `bits`: of a weight; `reserve_nbytes`: of the card left free."""

    bits: float
    kv_type: str
    retention: str
    rows: int
    free_nbytes: int
    tok_s: float
    reserve_nbytes: int


def settings_that_fit(model: ModelFacts, card: Card, wanted: Wanted) -> list[Setting]:
    """For each retention from the one asked for to the smallest, the best bits and KV type; best retention first."""
    found = []
    for kept in _retentions(wanted):
        asked = replace(wanted, kept=kept)
        if not _can_be_kept_so(model, asked):
            continue
        choices = list(_choices(model, card, asked))
        if not any(choice.bits >= LEAST_BITS for choice in choices):
            choices += _choices(model, card, replace(asked, reserve_nbytes=min(SMALL_RESERVE, asked.reserve_nbytes)))
        if choices:
            found.append(_best(choices))
    return found


def _can_be_kept_so(model: ModelFacts, wanted: Wanted) -> bool:
    """Whatever the memory: only a windowed document is longer than the model's context, and needs index heads."""
    if wanted.is_windowed:
        return model.index_heads
    return not 0 < model.max_context < wanted.context


def _retentions(wanted: Wanted) -> Iterator[Kept | None]:
    if wanted.by_llama:
        yield None
        return
    yield wanted.kept
    if wanted.kept is not None:
        own = wanted.kept.window_tokens
        summary = wanted.kept.summary_tokens
    else:
        own, summary = wanted.context, SUMMARY_TOKENS
    for window in WINDOWS:
        if window < own:
            yield Kept(PRESETS["small"].sink_tokens, summary, window)
    yield from (kept for kept in (PRESETS["balanced"], PRESETS["small"]) if kept.window_tokens < own)


def _choices(model: ModelFacts, card: Card, wanted: Wanted) -> Iterator[Setting]:
    """Of each KV type the most bits that fit."""
    for kv_type in _kv_types(model):
        yield from _most_bits(model, card, replace(wanted, kv_type=kv_type))


def _kv_types(model: ModelFacts) -> Sequence[KVType]:
    if model.allowed_kv is None:
        return KV_ORDER
    return [t for t in KV_ORDER if t in model.allowed_kv] or [KVType.FP16]


def _most_bits(model: ModelFacts, card: Card, wanted: Wanted) -> Iterator[Setting]:
    candidates = [model] if not _can_choose_bits(model, card, wanted) else _by_bits(model, wanted)
    for candidate in candidates:
        ledger = plan_ledger(candidate, card, wanted)
        if ledger.pool_tokens < wanted.room_tokens:
            continue
        nbytes = Reading(step_nbytes(candidate, card, wanted), read_nbytes(candidate, card, wanted)).nbytes(wanted.rows)
        more = (ledger.pool_tokens - wanted.room_tokens) // ledger.block_tokens * ledger.block_nbytes
        spare = more + max(0, -ledger.overdrawn_nbytes - ledger.nbytes("pool"))
        yield Setting(
            round(_served_bits(candidate, card, wanted), 2), wanted.kv_type, _retention(wanted), wanted.rows, spare,
            bandwidth_bound(card.bandwidth_gbps, nbytes), 0 if wanted.by_llama else wanted.reserve_nbytes,
        )  # fmt: skip
        return


def _served_bits(model: ModelFacts, card: Card, wanted: Wanted) -> float:
    """Plain weights are computed with as FP16 on a card and in the compute dtype on a processor, however they are
    stored."""
    if wanted.by_llama or model.kind not in ("plain", "gguf"):
        return model.bits
    return 8.0 * ITEMSIZE[wanted.compute] if card.is_cpu else FP16_BITS


def _can_choose_bits(model: ModelFacts, card: Card, wanted: Wanted) -> bool:
    """A model that is quantized already is served as it is, and there are other GGUF files of it; the torch engine's
    weights are plain."""
    return wanted.by_llama or (not card.is_cpu and model.kind not in ("exl2", "gptq"))


def _by_bits(model: ModelFacts, wanted: Wanted) -> Iterator[ModelFacts]:
    yield model
    offered = FILE_BITS.values() if wanted.by_llama else BITS
    yield from (requantized(model, bits) for bits in offered if bits < min(model.bits, FP16_BITS) - 0.01)


def _retention(wanted: Wanted) -> str:
    kept = wanted.kept
    return "full" if kept is None else f"{kept.sink_tokens}+{kept.summary_tokens}+{kept.window_tokens}"


def _best(choices: list[Setting]) -> Setting:
    """The most precise KV type with good weights; where none has them, the one with the best weights."""
    good = [choice for choice in choices if choice.bits >= GOOD_BITS]
    return good[0] if good else max(choices, key=lambda choice: choice.bits)
