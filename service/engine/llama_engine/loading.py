"""From a model directory with a GGUF to a runner: loads it, and refuses what would not be served rightly."""

import ctypes
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cache_store.fingerprint import Fingerprint
from cache_store.layout import KVLayout, KVType
from service.engine.llama_engine.context import LlamaContext
from service.engine.llama_engine.ledger import announce
from service.engine.llama_engine.library import FOR_THE_CARD, api, build, can_offload, features, lines, why
from service.engine.llama_engine.places import COPIES
from service.engine.llama_engine.runner import CHUNK_TOKENS, LlamaRunner, compute_dtype
from service.engine.llama_engine.sizes import N_DOCUMENTS, N_OUTPUTS, N_OWN, N_ROWS
from service.engine.llama_engine.state import StateFormat, StateMismatch, ggml_types
from service.engine.llama_engine.threads import default_threads
from service.engine.models.card import ModelCard, fingerprint
from service.engine.models.errors import EngineRefused, ModelDamaged, SourceRefused
from service.engine.models.gguf_header import read_header
from service.engine.models.weights import GGUF_NAME
from service.engine.protocol import RunnerLimits

Offload = Literal["auto", "all", "none"]

STEP_TOKENS = {"host": 64, "gpu": CHUNK_TOKENS}
"""Tokens of a document computed at once: on a processor a whole chunk would hold up streams."""
FLASH_ATTENTION = 1
_ALL_LAYERS = 1 << 16
_NO_DEVICES = (ctypes.c_void_p * 1)()
"""A list of devices ends with NULL."""
_PLAIN_ROPE = (0, 2)
"""`LLAMA_ROPE_TYPE_NORM` and `_NEOX`; positions of the others have several parts."""
ALL_KERNELS = "FA_ALL_QUANTS"
_BY_FLAG = ("CUDA :", "ROCm :", "MUSA :")
"""Backends that have attention over keys and values of different types only where a flag asked for it."""
_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
_CPU_CACHE = re.compile(r"CPU KV buffer size")


@dataclass(frozen=True, slots=True)
class Options:
    """`documents_nbytes`: memory for documents' KV. `max_context` 0 is the model's. `threads` None takes every
    core. `offload`: "all" computes on a GPU or not at all, "auto" where this build and machine can."""

    kv_type: KVType
    n_slots: int
    tail_tokens: int
    documents_nbytes: int
    max_context: int = 0
    threads: int | None = None
    offload: Offload = "auto"


def n_sequences(options: Options) -> int:
    """Of llama.cpp's: documents, tails, and those that keep them in order."""
    return N_OWN + N_DOCUMENTS + options.n_slots


def n_cells(layout: KVLayout, options: Options) -> tuple[int, int]:
    """Tokens of documents and of tails that the cache holds; a tail has the document's last token once more."""
    return options.documents_nbytes // layout.bytes_per_token, options.n_slots * (options.tail_tokens + 1)


def wants_gpu(offload: Offload) -> bool:
    """Raises EngineRefused for "all" on a build that cannot."""
    if offload == "all" and not can_offload():
        raise EngineRefused(
            "PREREAD_OFFLOAD=all, but llama.cpp finds no GPU that it computes on: this build of llama-cpp-python is "
            f"for the processor alone, or the card's driver is missing. {FOR_THE_CARD}, or take PREREAD_OFFLOAD=none"
        )
    return offload != "none" and can_offload()


def check_kernels(kv_type: KVType, on_gpu: bool) -> None:
    """Raises EngineRefused for keys and values of different types on a GPU whose build has no attention for them:
    llama.cpp would compute it on the processor, layer by layer, without saying so."""
    if not on_gpu or kv_type.key_bits == kv_type.value_bits:
        return
    if (found := features()) and any(name in found for name in _BY_FLAG) and ALL_KERNELS not in found:
        raise EngineRefused(
            f"this build of llama.cpp has no attention for PREREAD_KV_TYPE={kv_type} on a GPU, and would compute it on "
            "the processor: take k8v8 or k4v4, or build it with -DGGML_CUDA_FA_ALL_QUANTS=on among CMAKE_ARGS"
        )


def load_runner(model_dir: Path, card: ModelCard, options: Options) -> LlamaRunner:
    """Seconds, and all memory that it will take. Raises EngineRefused, ModelDamaged,
    MemoryPlanRefused."""
    check_file(model_dir / GGUF_NAME)
    layout, on_gpu = card.layout(options.kv_type), wants_gpu(options.offload)
    if not on_gpu:
        batch = N_ROWS, N_OUTPUTS, n_sequences(options)
        announce(model_dir, layout, n_cells(layout, options), batch, _max_context(card, options))
    model = _load_model(model_dir / GGUF_NAME, on_gpu)
    try:
        check_model(model, card)
        context = _new_context(model, layout, options)
    except BaseException:
        api().llama_model_free(model)
        raise
    try:
        check_place(on_gpu)
        _check_state(context, layout)
    except BaseException:
        context.close()
        raise
    tier = "gpu" if on_gpu else "host"
    return LlamaRunner(
        context,
        layout,
        _limits(card, options, context.n_vocab),
        identity(card, options.kv_type, tier),
        n_cells(layout, options),
        name=card.name,
        tier=tier,
        step_tokens=STEP_TOKENS[tier],
    )


def check_file(path: Path) -> None:
    """Raises ModelDamaged before llama.cpp, which may end the process, sees a file that says what cannot be."""
    try:
        read_header(path)
    except SourceRefused as error:
        raise ModelDamaged(str(error)) from None


def identity(card: ModelCard, kv_type: KVType, tier: str) -> Fingerprint:
    """The fingerprint of KV that this build makes of a model."""
    of_model = fingerprint(card, kv_type, compute_dtype(kv_type), f"llamacpp-{build()}", CHUNK_TOKENS)
    return replace(of_model, chunking=f"{CHUNK_TOKENS}/{STEP_TOKENS[tier]}/{N_ROWS}")


def _max_context(card: ModelCard, options: Options) -> int:
    return min(options.max_context or card.max_context, card.max_context)


def _limits(card: ModelCard, options: Options, n_vocab: int) -> RunnerLimits:
    return RunnerLimits(
        max_context=_max_context(card, options),
        chunk_tokens=CHUNK_TOKENS,
        n_slots=options.n_slots,
        tail_tokens=options.tail_tokens,
        vocab_size=n_vocab,
        n_documents=N_DOCUMENTS,
    )


def _load_model(path: Path, on_gpu: bool) -> Any:
    llama = api()
    lines.clear()
    params = llama.llama_model_default_params()
    params.n_gpu_layers = _ALL_LAYERS if on_gpu else 0
    if not on_gpu:
        # No layers is not enough: large products would be sent to a GPU that is there all the same.
        params.devices = ctypes.cast(_NO_DEVICES, ctypes.c_void_p)
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise EngineRefused(f"llama.cpp does not load {path}: {why()}")
    return model


def check_model(model: Any, card: ModelCard) -> None:
    """Raises EngineRefused for what has more state than keys and values of plain attention, ModelDamaged for a GGUF
    that is not of the card's shape."""
    llama = api()
    reasons = {
        "it carries a recurrent state": llama.llama_model_is_recurrent(model),
        "some of its layers carry a recurrent state": llama.llama_model_is_hybrid(model),
        "it attends through sliding windows": llama.llama_model_n_swa(model) > 0,
        "it writes by diffusion": llama.llama_model_is_diffusion(model),
        "it has an encoder": llama.llama_model_has_encoder(model),
        "its positions are not plain RoPE": llama.llama_model_rope_type(model) not in _PLAIN_ROPE,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise EngineRefused(
                f"{card.name} is not served by the llamacpp engine: {reason}, so that a snapshot of "
                "its KV would not be all of its state"
            )
    shape = (llama.llama_model_n_layer(model), llama.llama_model_n_head_kv(model), llama.llama_model_n_head(model))
    if shape != (card.n_layers, card.n_kv_heads, card.n_heads):
        raise ModelDamaged(f"the GGUF of {card.name} has {shape} layers, KV heads and heads, its card says otherwise")


def _new_context(model: Any, layout: KVLayout, options: Options) -> LlamaContext:
    llama = api()
    params = llama.llama_context_default_params()
    params.n_ctx = sum(n_cells(layout, options))
    params.n_batch = params.n_ubatch = N_ROWS
    params.n_outputs_max = params.n_outputs_max_per_seq = N_OUTPUTS
    params.n_seq_max = n_sequences(options)
    params.kv_unified = params.offload_kqv = params.no_perf = True
    # Values of other attention lie transposed in the cache, and cannot be quantized.
    params.flash_attn_type = FLASH_ATTENTION
    params.type_k, params.type_v = ggml_types(layout.kv_type)
    params.n_threads = params.n_threads_batch = options.threads or default_threads()
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise EngineRefused(f"llama.cpp makes no context of {params.n_ctx:,} tokens: {why()}")
    return LlamaContext(model, context, N_ROWS, N_OUTPUTS)


def check_place(on_gpu: bool) -> None:
    """Raises EngineRefused unless all layers and the whole cache are on the GPU that they should be on."""
    if not on_gpu:
        return
    found = [match for line in lines if (match := _OFFLOADED.search(line))]
    counts = (found[-1][1], found[-1][2]) if found else ("0", "?")
    if counts[0] != counts[1] or any(_CPU_CACHE.search(line) for line in lines):
        raise EngineRefused(
            f"llama.cpp put {counts[0]} of {counts[1]} layers on the GPU, or a part of the KV cache beside it: that is "
            "many times slower. Use a smaller model or cache (PREREAD_RESIDENT_BYTES), or PREREAD_OFFLOAD=none"
        )


def _check_state(context: LlamaContext, layout: KVLayout) -> None:
    """One token's state has to be of the form that is stored. Raises EngineRefused."""
    one = np.ones(1, np.int32)
    context.decode(0 * one, 0 * one, COPIES * one, np.zeros(1, bool))
    try:
        StateFormat(layout).read(context.state(COPIES), 0, 1)
    except StateMismatch as error:
        raise EngineRefused(f"the model's state is not plain attention KV: {error}") from None
    context.remove(COPIES)
