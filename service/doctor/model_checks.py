"""Checks of the model: that it is there, how it was quantized, and that it fits."""

from collections.abc import Callable
from pathlib import Path

from cache_store.layout import KVType
from service.doctor.context import Context
from service.doctor.findings import Finding
from service.engine.ledger import GIB
from service.engine.models.card import check_engine, check_kv_type, load_card
from service.engine.models.configs import CONFIG_NAME
from service.engine.models.decoder import read_decoder
from service.engine.models.draft import check_draft
from service.engine.models.errors import ModelError, ModelNotFound
from service.engine.models.quantized import check_weights, find_quantization
from service.engine.torch_engine.ledger import machine_memory
from service.planning.headers import read_model

_MODELS = "`preread models list` shows what there is; `preread models import` makes one"
_SMALL_GROUP = 32
_LARGEST_SHARE = 3
"""A draft model of more than a third of the model's parameters gains nothing."""
_FAKE = "the fake engine has no model"
_NO_CONTEXT_HELPS = (
    "no context and no KV type helps: take the engine that computes it (PREREAD_ENGINE; exl2 needs an NVIDIA card), or "
    "another model"
)
_SEEN_BACKENDS = ("cuda", "metal")
"""Those of llama.cpp whose memory is known here: of NVIDIA's cards, and Apple's, which is the machine's own."""


def model(context: Context) -> Finding:
    """Whether the model is imported, whole, and served by this engine in this KV type."""
    say, settings = context.finding("model"), context.settings
    if settings.engine == "fake":
        return say.skip(_FAKE)
    try:
        card = load_card(context.model_dir)
    except ModelError as error:
        return say.fail("; ".join([str(error), *_import_refusals(context.model_dir, error)]), _MODELS)
    if wrong := [
        *_refusal(check_engine, card, settings.engine),
        *_refusal(check_kv_type, card, KVType(settings.kv_type)),
    ]:
        return say.fail("; ".join(wrong), _MODELS)
    return say.ok(f"{card.name}: {card.architecture}, {card.quantization} weights, KV {settings.kv_type}")


def _import_refusals(model_dir: Path, error: ModelError) -> list[str]:
    """Why a directory that is not imported yet never will be."""
    if not isinstance(error, ModelNotFound) or not (model_dir / CONFIG_NAME).is_file():
        return []
    try:
        problems = list(read_model(model_dir).problems)
    except ModelError as refused:
        problems = [str(refused)]
    return [f"an import refuses it: {problem}" for problem in problems]


def _refusal(check: Callable[..., None], *arguments: object) -> list[str]:
    """Why a check of the engine refuses; nothing when it does not."""
    try:
        check(*arguments)
    except ModelError as error:
        return [str(error)]
    return []


def draft_model(context: Context) -> Finding:
    """Whether the model that guesses has the same tokens, is served by this engine, and is smaller."""
    say, settings = context.finding("draft-model"), context.settings
    if settings.draft_model_dir is None:
        return say.skip("PREREAD_DRAFT_MODEL names none")
    try:
        card = check_draft(context.model_dir, settings.draft_model_dir, settings.engine)
        main = load_card(context.model_dir)
    except ModelError as error:
        return say.fail(str(error), "take a smaller model of the same family, or unset PREREAD_DRAFT_MODEL")
    if settings.speculation == "off":
        return say.warn(
            "PREREAD_SPECULATION=off: it is not loaded", "set PREREAD_SPECULATION to auto, or unset PREREAD_DRAFT_MODEL"
        )
    if card.n_parameters * _LARGEST_SHARE > main.n_parameters:
        return say.warn(
            f"{card.name} has {card.n_parameters / main.n_parameters:.0%} of the parameters of {main.name}: a guess "
            "takes nearly as long as a token",
            "take one of a tenth of the size, or unset PREREAD_DRAFT_MODEL",
        )
    return say.ok(
        f"{card.name}: {card.n_parameters / main.n_parameters:.0%} of the size of {main.name}, the same tokens"
    )


def gptq(context: Context) -> Finding:
    """GPTQ models in small groups, or with their inputs in another order, are read more slowly."""
    say = context.finding("gptq")
    try:
        found = find_quantization(context.model_dir)
    except ModelError as error:
        return say.fail(str(error), "take an EXL2, GPTQ or plain copy: FP8 and others are not read")
    if found is None or found.method != "gptq":
        return say.skip("no GPTQ model")
    try:
        check_weights(context.model_dir, found, read_decoder(context.model_dir).num_hidden_layers)
    except ModelError as error:
        return say.fail(str(error), "take a whole copy in 4 bits, of the format gptq or gptq_v2, or an EXL2 one")
    size, order = found.settings.get("group_size"), bool(found.settings.get("desc_act"))
    wrong = [f"group_size is {size}"] if isinstance(size, int) and 0 < size <= _SMALL_GROUP else []
    wrong += ["desc_act is true"] if order else []
    if wrong:
        return say.warn(
            f"{context.model_dir.name}: {' and '.join(wrong)}: more scales are read for each weight, or inputs are "
            "gathered out of their order",
            "take a copy with group_size 128 and without desc_act, or an EXL2 one",
        )
    return say.ok(f"{found.label}")


def cache_size(context: Context) -> Finding:
    """Whether the model and a cache of this context fit."""
    say, plan = context.finding("cache-size"), context.plan()
    if isinstance(plan, str):
        return say.skip(plan)
    wanted, has = plan.wanted["context"], plan.ledger["document_tokens"]
    if plan.ledger["total_nbytes"] and not plan.fits:
        if context.not_computed:
            return say.fail("; ".join(plan.problems), _NO_CONTEXT_HELPS)
        best = plan.settings[0] if plan.settings else None
        instead = f"; KV {best.kv_type} with retention {best.retention} would fit" if best else ""
        return say.fail(
            f"{wanted:,} tokens: {'; '.join(plan.problems)}",
            f"lower PREREAD_MAX_CONTEXT or PREREAD_MAX_BATCH, or choose another KV type (`preread plan`){instead}",
        )
    return say.ok(f"a document of {wanted:,} tokens fits; there is room for {has:,}")


def host_memory(context: Context) -> Finding:
    """Whether memory that is promised to documents is there."""
    say, settings = context.finding("host-memory"), context.settings
    name, nbytes = (
        ("PREREAD_HOST_BYTES", settings.host_bytes)
        if context.on_card
        else ("PREREAD_RESIDENT_BYTES", settings.resident_bytes)
    )
    if settings.engine == "fake":
        return say.skip(_FAKE)
    if context.offloads and (found := _cards_memory(context)) is not None:
        return found
    memory = machine_memory()
    free = min(memory.free + context.probes.engines_nbytes(), memory.total)
    if nbytes > free:
        return say.fail(
            f"{name} is {nbytes / GIB:.1f} GiB, and {free / GIB:.1f} GiB are available",
            f"lower {name}: else the machine swaps, or the engine is killed",
        )
    return say.ok(f"{name} is {nbytes / GIB:.1f} GiB of {free / GIB:.1f} GiB available")


def _cards_memory(context: Context) -> Finding | None:
    """What llama.cpp takes on cards, over all of which it spreads the layers and their KV; None where it has none but
    this machine's memory."""
    say, cards = context.finding("host-memory"), context.cards()
    nbytes = context.settings.resident_bytes
    if not cards:
        unseen = [name for name in context.probes.llama_backends() or () if name not in _SEEN_BACKENDS]
        return say.skip(f"llama.cpp was compiled for {unseen[0]}, whose cards are not looked at") if unseen else None
    free = sum(min(card.free_nbytes + card.engines_nbytes, card.total_nbytes) for card in cards)
    where = f"available on {', '.join(card.name for card in cards)}"
    if nbytes > free:
        return say.fail(
            f"PREREAD_RESIDENT_BYTES is {nbytes / GIB:.1f} GiB, and {free / GIB:.1f} GiB are {where}",
            "lower PREREAD_RESIDENT_BYTES: llama.cpp takes it on the card at once, or does not start",
        )
    return say.ok(f"PREREAD_RESIDENT_BYTES is {nbytes / GIB:.1f} GiB of {free / GIB:.1f} GiB {where}")
