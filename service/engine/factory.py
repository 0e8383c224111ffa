"""From a configuration to an engine: the one place that knows how to make each kind.

Importing this module is cheap; torch and the model are loaded by `open_host`.
"""

import logging
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from cache_store.layout import KVType
from cache_store.tiers.opening import TierConfig
from service.engine.ledger import ALONE

if TYPE_CHECKING:
    from cache_store.store import SnapshotStore
    from service.engine.exl2_engine.loading import Options
    from service.engine.host.host import EngineHost
    from service.engine.models.card import ModelCard
    from service.engine.protocol import Runner
    from service.engine.scheduler.detokenizer import Decoder

log = logging.getLogger(__name__)

FAKE_ANSWER = "This is the fake engine: it has no model."
FAKE_REPLAY = b"Repeat: "
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to make an engine; crosses to the engine process as JSON.

    `engine`: "torch"; "exl2", on an NVIDIA card; "llamacpp", for a GGUF; or "fake" (no model; `model_dir` may be "",
    then tokens are bytes). `compute_dtype` "auto" takes what is faster here, and is of the torch engine.
    `disk_budget_nbytes` None is no limit. `max_context` and `threads` 0 take the model's and the library's own.
    `max_batch` answers run at once; `idle_tails` more sessions keep their turns in memory. `index_budget_nbytes`, of
    the memory where the model computes, hold the indexes of windowed documents, from which a question fetches in
    `fetch_rounds`, 1 or 2. `watch_answers`: say with an answer where it looked, by the model's index heads.
    `speculation` "off" guesses no tokens; "auto" is "on" where that was measured to pay: with the engines that can.
    `draft_model_dir`: a small model with the same tokens, that guesses too; "" for none. `tiers`: where snapshots are
    kept beyond the disk. `fake_script`: token ids of every answer of a fake engine; with
    `fake_from_kv` its answers follow from the bytes of the stored KV instead. Its pace: seconds of a step, of each of
    its rows, of a layer of a chunk that is read, of a block of a layer that is loaded.

    Of the exl2 engine: `device` (the first card, or "cpu" to try it without one, then `resident_budget_nbytes` is for
    documents). On a card documents get all that is left when `gpu_reserve_nbytes` stay free, `gpu_pool_nbytes` at most
    unless that is 0; those that leave it go to `host_budget_nbytes` of page-locked host memory. `attention_backend`:
    "auto", "triton", "portable". `product` (of few rows with quantized weights): "auto", "triton", "exllamav2".

    Of the llamacpp engine: `offload` "all" computes on a GPU or not at all, "none" does not, "auto" where it can;
    `resident_budget_nbytes` are taken at once, wherever it computes.
    """

    store_dir: str
    engine: str = "torch"
    model_dir: str = ""
    kv_type: str = "k8v4"
    compute_dtype: str = "auto"
    disk_budget_nbytes: int | None = None
    free_floor_nbytes: int = 512 << 20
    resident_budget_nbytes: int = 2 << 30
    index_budget_nbytes: int = 512 << 20
    fetch_rounds: int = 1
    watch_answers: bool = True
    speculation: Literal["auto", "on", "off"] = "auto"
    draft_model_dir: str = ""
    max_context: int = 0
    max_batch: int = 4
    idle_tails: int = 4
    tail_tokens: int = 2048
    threads: int = 0
    drain_s: float = 5.0
    device: str = "cuda:0"
    attention_backend: Literal["auto", "triton", "portable"] = "auto"
    product: Literal["auto", "triton", "exllamav2"] = "auto"
    gpu_reserve_nbytes: int = 1 << 30
    gpu_pool_nbytes: int = 0
    host_budget_nbytes: int = 0
    cuda_graphs: bool = True
    offload: Literal["auto", "all", "none"] = "auto"
    tiers: TierConfig = TierConfig()
    fake_script: list[int] = []
    fake_from_kv: bool = False
    fake_step_s: float = 0.0
    fake_layer_s: float = 0.0
    fake_row_s: float = 0.0
    fake_load_s: float = 0.0
    fake_chunk_tokens: int = 256
    fake_layers: int = 2


def open_host(config: EngineConfig) -> "EngineHost":
    """Load the model and open the store: seconds. Raises ModelError, OSError, ValueError."""
    makers = {"torch": _torch_parts, "exl2": _exl2_parts, "llamacpp": _llama_parts, "fake": _fake_parts}
    make = makers.get(config.engine)
    if make is None:
        raise ValueError(f"no engine {config.engine!r}: it is one of {', '.join(makers)}")
    from cache_store.disk import allow_many_files
    from cache_store.tiers.opening import open_store
    from service.engine.host.host import EngineHost

    allow_many_files()
    if config.draft_model_dir:
        config = _with_draft(config)
    parts = make(config)
    runner = parts.runner
    if config.max_context:
        limits = runner.limits
        runner.limits = replace(limits, max_context=min(config.max_context, limits.max_context))
    if config.speculation == "off":
        runner.limits = replace(runner.limits, draft_tokens=0)
    store = open_store(
        Path(config.store_dir),
        config.tiers,
        uploads=True,
        budget_nbytes=config.disk_budget_nbytes,
        free_floor_nbytes=config.free_floor_nbytes,
    )
    _put_in_order(store)
    store.serve(runner.fingerprint, parts.draft.fingerprint if parts.draft is not None else None)
    if parts.draft is not None:
        _compare_contexts(runner, parts.draft)
    return EngineHost(
        runner,
        store,
        parts.decoder,
        parts.end_ids,
        resident_budget_nbytes=_resident_budget(config, runner),
        max_batch=config.max_batch,
        engine=config.engine,
        index_heads=parts.index_heads,
        index_budget_nbytes=config.index_budget_nbytes,
        replay_ids=parts.replay_ids,
        fetch_rounds=config.fetch_rounds,
        draft=parts.draft,
        draft_budget_nbytes=getattr(getattr(parts.draft, "pool", None), "nbytes", None),
    )


def _with_draft(config: EngineConfig) -> EngineConfig:
    """The configuration, without its draft model where nothing is guessed. Raises ModelError for one that does not fit
    the model."""
    from service.engine.models.draft import check_draft

    check_draft(Path(config.model_dir), Path(config.draft_model_dir), config.engine)
    if config.speculation != "off":
        return config
    log.info("no tokens are guessed (PREREAD_SPECULATION=off): the draft model is not loaded")
    return msgspec.structs.replace(config, draft_model_dir="")


def _compare_contexts(runner: "Runner", draft: "Runner") -> None:
    most, drafted = runner.limits.max_context, draft.limits.max_context
    if drafted < most:
        log.warning(
            "the draft model's context is %d tokens, the model's %d: what is longer is answered without it",
            drafted, most,
        )  # fmt: skip


def _put_in_order(store: "SnapshotStore") -> None:
    """Remove what a killed engine left. Documents can be asked about also where that fails."""
    from cache_store.errors import StorageFailed

    try:
        report = store.sweep()
    except StorageFailed as error:
        log.warning("the snapshot store was not put in order: %s", error)
        return
    if report.removed_names:
        n, nbytes = len(report.removed_names), report.removed.nbytes
        log.info("removed %d leftovers of the snapshot store, %d bytes", n, nbytes)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a kind of engine is made of, beside the store: see `EngineHost`. `draft`: the model that guesses."""

    runner: "Runner"
    decoder: "Decoder"
    end_ids: frozenset[int]
    index_heads: list[tuple[int, int]]
    replay_ids: list[int]
    draft: "Runner | None" = None


def _parts(runner: "Runner", model_dir: Path) -> _Parts:
    """The parts that the model's directory has."""
    from service.engine.index_heads import load_index_heads
    from service.engine.models.card import load_card
    from service.engine.prompt import PromptTemplate
    from service.engine.tokenizer import Tokenizer

    card, tokenizer = load_card(model_dir), Tokenizer.load(model_dir)
    replay_ids = PromptTemplate(card.prompt, tokenizer).replay_ids()
    return _Parts(runner, tokenizer, frozenset(card.eos_token_ids), load_index_heads(model_dir), replay_ids)


def _resident_budget(config: EngineConfig, runner: "Runner") -> int:
    """Memory for documents: a runner that has allocated it already says how much that is."""
    pool = getattr(runner, "pool", None)
    return config.resident_budget_nbytes if pool is None else pool.nbytes


def resolve_dtype(compute_dtype: str) -> str:
    """ "auto" is BF16 where the processor multiplies it natively, else FP32."""
    if compute_dtype != "auto":
        return compute_dtype
    try:
        flags = frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return "float32"
    return "bfloat16" if flags & BF16_FLAGS else "float32"


def _n_slots(config: EngineConfig) -> int:
    """One more is for probes."""
    return config.max_batch + config.idle_tails + 1


def _draft_slots(config: EngineConfig) -> int:
    """Turns are not kept for a draft model: as many tails as answers at once, and one for probes."""
    return config.max_batch + 1


OPENMP_SPIN = "10000"
"""GOMP_SPINCOUNT unless the environment says otherwise. Threads that wait for each other spin far longer by default:
on a machine that also does other work, they spin while the one they wait for is kept off its core."""

ONEDNN_KEPT = "64"
"""ONEDNN_PRIMITIVE_CACHE_CAPACITY unless the environment says otherwise: BF16 products are compiled for each number of
rows, and the library's own limit of 1,024 lets an engine grow by some hundred MB over a few thousand questions."""


def _torch_parts(config: EngineConfig) -> _Parts:
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPIN)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", ONEDNN_KEPT)
    from service.engine.models.card import check_engine, check_kv_type, load_card
    from service.engine.models.draft import draft_kv_type

    model_dir, kv_type = Path(config.model_dir), KVType(config.kv_type)
    card, dtype = load_card(model_dir), resolve_dtype(config.compute_dtype)
    check_engine(card, "torch")
    check_kv_type(card, kv_type)
    _plan_memory(config, card, dtype)
    from service.engine.torch_engine.runner import TorchRunner  # what it takes is in the plan

    load = partial(
        TorchRunner.load, compute_dtype=dtype, tail_tokens=config.tail_tokens, threads=config.threads or None
    )
    draft = None
    if config.draft_model_dir:
        draft_dir = Path(config.draft_model_dir)
        draft = load(draft_dir, kv_type=draft_kv_type(load_card(draft_dir), kv_type), n_slots=_draft_slots(config))
    runner = load(model_dir, kv_type=kv_type, n_slots=_n_slots(config))
    parts = _parts(runner, model_dir)
    if config.watch_answers:
        runner.watched_heads = parts.index_heads
    return replace(parts, draft=draft)


def _plan_memory(config: EngineConfig, card: "ModelCard", dtype: str) -> None:
    """Say what the torch engine will take before it takes it. Raises MemoryPlanRefused when that is not there."""
    from service.engine.torch_engine.ledger import HostSizes, announce, draft_beside

    sizes = HostSizes(_n_slots(config), config.tail_tokens, config.resident_budget_nbytes)
    beside = ALONE
    if config.draft_model_dir:
        draft_sizes = HostSizes(_draft_slots(config), config.tail_tokens, 0)
        beside = draft_beside(Path(config.draft_model_dir), dtype, KVType(config.kv_type), draft_sizes)
    ledger = announce(Path(config.model_dir), card, dtype, config.kv_type, sizes, beside)
    log.info("the machine's memory:\n%s", ledger.table())


def _exl2_parts(config: EngineConfig) -> _Parts:
    from service.engine.exl2_engine.graph_sizes import DRAFT_TOKENS
    from service.engine.exl2_engine.loading import Options, load_runner
    from service.engine.exl2_engine.loading_pair import load_pair
    from service.engine.index_heads import load_index_heads

    model_dir = Path(config.model_dir)
    index_heads = load_index_heads(model_dir)
    on_cpu = config.device == "cpu"
    options = Options(
        kv_type=KVType(config.kv_type),
        n_slots=_n_slots(config),
        tail_tokens=config.tail_tokens,
        max_context=config.max_context,
        max_rows=config.max_batch,
        draft_tokens=0 if config.speculation == "off" else DRAFT_TOKENS,
        backend=config.attention_backend,
        product=config.product,
        index_nbytes=config.index_budget_nbytes if index_heads else 0,
        watched_heads=tuple(index_heads) if config.watch_answers else (),
        reserve_nbytes=config.gpu_reserve_nbytes,
        pool_nbytes=config.resident_budget_nbytes if on_cpu else config.gpu_pool_nbytes or None,
        graphs=config.cuda_graphs,
    )
    if config.draft_model_dir:
        runner, draft = load_pair(
            model_dir, options, Path(config.draft_model_dir), _draft_options(config, options), config.device
        )
    else:
        runner, draft = load_runner(model_dir, options, config.device), None
    if config.host_budget_nbytes:
        # Not before: memory that is pinned in another thread would end the capture of a decode step.
        runner.keep_in_host_memory(config.host_budget_nbytes)
    return replace(_parts(runner, model_dir), draft=draft)


def _draft_options(config: EngineConfig, options: "Options") -> "Options":
    """Of the model that guesses: its steps of several rows catch up with what was sampled."""
    from service.engine.models.card import load_card
    from service.engine.models.draft import draft_kv_type

    kv_type = draft_kv_type(load_card(Path(config.draft_model_dir)), options.kv_type)
    return replace(
        options, kv_type=kv_type, n_slots=_draft_slots(config), max_context=0, index_nbytes=0, watched_heads=()
    )


def _llama_parts(config: EngineConfig) -> _Parts:
    from service.engine.llama_engine.loading import Options, check_kernels, load_runner, wants_gpu
    from service.engine.models.card import check_engine, check_kv_type, load_card

    model_dir, kv_type = Path(config.model_dir), KVType(config.kv_type)
    card = load_card(model_dir)
    check_engine(card, "llamacpp")
    check_kv_type(card, kv_type)
    check_kernels(kv_type, wants_gpu(config.offload))
    options = Options(
        kv_type=kv_type,
        n_slots=_n_slots(config),
        tail_tokens=config.tail_tokens,
        documents_nbytes=config.resident_budget_nbytes,
        max_context=config.max_context,
        threads=config.threads or None,
        offload=config.offload,
    )
    return replace(_parts(load_runner(model_dir, card, options), model_dir), index_heads=[])


def _fake_parts(config: EngineConfig) -> _Parts:
    from service.engine.fake_runner import ByteDecoder, FakeRunner
    from service.engine.models.card import load_card
    from service.engine.tokenizer import Tokenizer

    script, decoder = config.fake_script, ByteDecoder()
    vocab_size, end_ids = 512, frozenset([ByteDecoder.END])
    if config.model_dir:
        card = load_card(Path(config.model_dir))
        decoder = Tokenizer.load(Path(config.model_dir))
        vocab_size, end_ids = card.vocab_size, frozenset(card.eos_token_ids)
    elif not script and not config.fake_from_kv:
        script = [*FAKE_ANSWER.encode(), ByteDecoder.END]
    runner = FakeRunner(
        script=script,
        vocab_size=vocab_size,
        kv_type=KVType(config.kv_type),
        n_layers=config.fake_layers,
        chunk_tokens=config.fake_chunk_tokens,
        n_slots=_n_slots(config),
        tail_tokens=config.tail_tokens,
        step_delay_s=config.fake_step_s,
        layer_delay_s=config.fake_layer_s,
        row_delay_s=config.fake_row_s,
        load_delay_s=config.fake_load_s,
    )
    return _Parts(runner, decoder, end_ids, [(0, 0)], list(FAKE_REPLAY))
