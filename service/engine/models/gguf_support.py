"""Which GGUF files are imported rightly: transformers reads some keys and tensors, and leaves out others in silence.

What it leaves out would be computed as if it were not there, or drawn at random, so that it is refused from the header:
by an import, and by a plan before. Needs no torch.
"""

from collections.abc import Iterator
from typing import Any

from gguf import GGMLQuantizationType

from service.engine.models.errors import ArchitectureRefused
from service.engine.models.gguf_header import Header, Tensor
from service.engine.models.gguf_parts import check_whole
from service.engine.models.gguf_sizes import SERVED, Sizes, shapes_of, sizes_of
from service.engine.models.support import why_not

TOKENIZERS = ("gpt2", "llama", "t5", "gemma4")
"""Kinds of which transformers makes a tokenizer."""
UNREAD_TYPES = ("I8", "I16", "I32", "I64", "F64", "Q1_0", "Q8_1", "Q8_K")
"""Of tensors that cannot be made plain weights."""
_QWEN3_WIDTH = 128
"""transformers takes it for every Qwen3 that comes as a GGUF."""
_FACTORS = "rope_freqs.weight"
_BY_LENGTH = ("rope_factors_long.weight", "rope_factors_short.weight")
_SCALES = ("logit_scale", "residual_scale", "embedding_scale", "attention.scale", "attention.output_scale")


def check_gguf(header: Header, *, kept: bool) -> None:
    """Raises SourceRefused, and ArchitectureRefused for what would be computed wrongly; `kept`: by llama.cpp, which
    reads all of the file."""
    check_whole(header.path, header)
    sizes = sizes_of(header)
    reasons = reasons_against(header, sizes, kept=kept)
    if reasons:
        raise ArchitectureRefused(f"{header.path.name} is not imported: {'; '.join(reasons)}")


def reasons_against(header: Header, sizes: Sizes, *, kept: bool = False) -> tuple[str, ...]:
    """Why it is not imported; nothing where it is. Raises SourceRefused for values that cannot be."""
    if sizes.arch not in SERVED:
        why = why_not(sizes.arch)
        return (f"GGUF files of architecture {sizes.arch!r} are not served{why}, only {', '.join(SERVED)}",)
    found = list(_of_any(header, sizes))
    if not kept:
        found += _of_plain(header, sizes)
    return tuple(found)


def _of_any(header: Header, sizes: Sizes) -> Iterator[str]:
    """Features that a stored KV cannot have, whoever computes it."""
    fields, arch = header.fields, sizes.arch
    for key in sizes.by_layer:
        yield f"its layers are of different sizes ({key})"
    if (experts := header.number(f"{arch}.expert_count", 0)) > 1:
        yield f"it is a mixture of {experts} experts"
    window = header.number(f"{arch}.attention.sliding_window", 0)
    if 0 < window < sizes.max_context:
        yield f"it attends through a sliding window of {window} tokens"
    if _is_set(fields.get(f"{arch}.attn_logit_softcapping")):
        yield "its attention scores are soft-capped"
    if _is_set(fields.get(f"{arch}.final_logit_softcapping")):
        yield "its logits are soft-capped"
    if _is_set(fields.get(f"{arch}.attention.max_alibi_bias")):
        yield "its positions are biases on the scores (ALiBi)"
    if fields.get(f"{arch}.attention.causal", True) is not True:
        yield "its attention is not causal"
    if f"{arch}.rope.dimension_sections" in fields:
        yield "its RoPE is multimodal (MRoPE)"
    if any(name in header.tensors for name in _BY_LENGTH):
        yield "its RoPE changes with the length of the context, so that stored KV would not fit"
    kind = header.text(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        yield f"its RoPE type is {kind}, supported are none, linear, yarn"
    if (width := _read_width(header, sizes)) != sizes.head_dim:
        yield f"its heads are {sizes.head_dim} wide, and would be taken for {width}"
    if (value := header.number(f"{arch}.attention.value_length", sizes.head_dim)) != sizes.head_dim:
        yield f"its values are {value} wide, and its keys {sizes.head_dim}"
    kind = header.text("tokenizer.ggml.model")
    if kind not in TOKENIZERS:
        yield f"its tokenizer is of kind {kind!r}, and only {', '.join(TOKENIZERS)} are read"


def _of_plain(header: Header, sizes: Sizes) -> Iterator[str]:
    """What llama.cpp computes, and transformers leaves out of what it makes of a GGUF."""
    arch, kept = sizes.arch, "keep it for llama.cpp (--engine llamacpp), or import its Hugging Face directory"
    kind = header.text(f"{arch}.rope.scaling.type", "none")
    if kind in ("linear", "yarn") or header.real(f"{arch}.rope.scale_linear", 1.0) != 1:
        yield f"its RoPE is scaled, which is not read from a GGUF: {kept}"
    if (tensor := header.tensors.get(_FACTORS)) is not None and not _is_of_ones(header, tensor):
        yield f"its RoPE has factors ({_FACTORS}), which are not read from a GGUF: {kept}"
    turned = header.number(f"{arch}.rope.dimension_count", sizes.head_dim)
    if turned != sizes.head_dim and arch != "llama":
        yield f"RoPE turns only {turned} of the {sizes.head_dim} of each head, which is not read from a GGUF: {kept}"
    for name in (*_SCALES, "attention.clamp_kqv"):
        if _is_set(header.fields.get(f"{arch}.{name}")) and header.fields[f"{arch}.{name}"] != 1:
            yield f"its {arch}.{name} is not read from a GGUF: {kept}"
    if header.fields.get("general.name") == "mistral":
        yield "transformers reads no GGUF whose general.name is mistral: give it another one"
    yield from _of_tensors(header, sizes, kept)


def _of_tensors(header: Header, sizes: Sizes, kept: str) -> Iterator[str]:
    expected = shapes_of(sizes)
    if missing := [name for name in expected if name not in header.tensors]:
        yield f"{len(missing)} of its tensors are missing, the first is {missing[0]}"
    known = {*expected, "output.weight", _FACTORS, *_BY_LENGTH}
    if others := [name for name in header.tensors if name not in known]:
        yield f"its tensor {others[0]} would be left out: {kept}"
    if unread := {tensor.kind.name for tensor in header.tensors.values() if tensor.kind.name in UNREAD_TYPES}:
        yield f"its tensors of type {', '.join(sorted(unread))} cannot be made plain weights"


def _read_width(header: Header, sizes: Sizes) -> int:
    """Of a head, as transformers reads it."""
    if sizes.arch == "qwen3":
        return _QWEN3_WIDTH
    usual = max(1, sizes.hidden // sizes.n_heads)
    return header.number(f"{sizes.arch}.rope.dimension_count", usual) if sizes.arch == "llama" else usual


def _is_set(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | list | tuple) and bool(value)


def _is_of_ones(header: Header, tensor: Tensor) -> bool:
    """As older converters wrote it, to no effect."""
    import numpy as np

    if tensor.kind != GGMLQuantizationType.F32:
        return False
    values = np.fromfile(header.path, np.float32, tensor.n_elements, offset=tensor.first)
    return bool((values == 1).all())
