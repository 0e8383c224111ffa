"""A tiny GGUF with one damage each: bytes that cannot be, and values that mean nothing."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValue, GGUFValueType

from tests.service.engine.models.test_gguf import random_tensors, write_model

Kind = GGUFValueType
HUGE = 2**41
N_TOKENS = 259


def value(of: Any, kind: Kind, sub_kind: Kind | None = None) -> GGUFValue:
    return GGUFValue(of, kind, sub_kind)


def numbers(*of: int) -> GGUFValue:
    return value(list(of), Kind.ARRAY, Kind.UINT32)


def whole(of: int) -> GGUFValue:
    return value(of, Kind.INT32)


def real(of: float) -> GGUFValue:
    return value(of, Kind.FLOAT32)


def text(of: str) -> GGUFValue:
    return value(of, Kind.STRING)


def header(n_tensors: int, n_fields: int, *parts: bytes, version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, n_tensors, n_fields) + b"".join(parts)


def key(name: bytes, kind: int, *parts: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + b"".join(parts)


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, first: int = 0) -> bytes:
    form = f"<I{len(shape)}QIQ"
    return struct.pack("<Q", len(name)) + name + struct.pack(form, len(shape), *shape, kind, first)


def lists(depth: int) -> bytes:
    return struct.pack("<IQ", Kind.ARRAY, 1) * depth + struct.pack("<IQB", Kind.UINT8, 1, 1)


BYTES: dict[str, tuple[bytes, str]] = {
    "nothing but its name": (b"GGUF", "cut off"),
    "of its header a part": (b"GGUF\x03\x00\x00\x00\x01", "cut off"),
    "an old version": (header(0, 0, version=1), "version 1"),
    "the other byte order": (header(0, 0, version=3 << 24), "other byte order"),
    "2^41 numbers": (header(0, 1, key(b"a", Kind.ARRAY, struct.pack("<IQ", Kind.UINT8, HUGE))), "more than the file"),
    "2^41 texts": (header(0, 1, key(b"a", Kind.ARRAY, struct.pack("<IQ", Kind.STRING, HUGE))), "more than the file"),
    "empty lists without end": (
        header(0, 1, key(b"a", Kind.ARRAY, struct.pack("<IQ", Kind.ARRAY, HUGE))), "list of lists"
    ),
    "lists in lists": (header(0, 1, key(b"a", Kind.ARRAY, lists(5000))), "list of lists"),
    "2^41 keys": (header(0, HUGE), "which no model has"),
    "2^41 tensors": (header(HUGE, 0), "which no model has"),
    "a key of 2^41 bytes": (header(0, 1, struct.pack("<Q", HUGE), b"a" * 40), "bytes long"),
    "a text of 2^63 bytes": (header(0, 1, key(b"a", Kind.STRING, struct.pack("<Q", 2**63))), "bytes long"),
    "a key that is no text": (header(0, 1, key(b"\xff\xfe", Kind.UINT8, b"\x01")), "not UTF-8"),
    "a key twice": (header(0, 2, key(b"a", Kind.UINT8, b"\x01") * 2), "twice"),
    "a field of no type": (header(0, 1, key(b"a", 77, b"\x01")), "type that is not known (77)"),
    "a list of no type": (header(0, 1, key(b"a", Kind.ARRAY, struct.pack("<IQ", 77, 1))), "type that is not known"),
    "a text that is not UTF-8": (
        header(0, 1, key(b"a", Kind.ARRAY, struct.pack("<IQQ", Kind.STRING, 1, 1), b"\xff")), "not UTF-8"
    ),
    "a text that ends after the file": (
        header(0, 1, key(b"a", Kind.ARRAY, struct.pack("<IQQ", Kind.STRING, 1, HUGE))), "cut off"
    ),
    "an alignment of 3": (
        header(0, 1, key(b"general.alignment", Kind.UINT32, struct.pack("<I", 3))), "power of two"
    ),
    "a tensor of no type": (header(1, 0, tensor(b"a", (32,), 99), bytes(999)), "type that is not known (99)"),
    "a tensor without elements": (header(1, 0, tensor(b"a", (32, 0)), bytes(999)), "of shape (0, 32)"),
    "a tensor of 2^80 elements": (header(1, 0, tensor(b"a", (2**40, 2**40)), bytes(999)), "which no tensor has"),
    "a tensor of 2^31 dimensions": (
        header(1, 0, struct.pack("<QcI", 1, b"a", 2**31), bytes(999)), "2,147,483,648 dimensions"
    ),
    "a tensor of half a block": (header(1, 0, tensor(b"a", (48,), 2), bytes(999)), "stores 32 at a time"),
    "a tensor twice": (header(2, 0, tensor(b"a", (8,)), tensor(b"a", (8,), 0, 32), bytes(999)), "twice"),
    "a tensor within another": (
        header(2, 0, tensor(b"a", (8,)), tensor(b"b", (8,)), bytes(999)), "does not begin where"
    ),
    "a tensor behind the file": (header(1, 0, tensor(b"a", (8,), 0, 2**62), bytes(999)), "does not begin where"),
}  # fmt: skip
"""All of a file -> what is said of it."""

WRONG: dict[str, tuple[str, GGUFValue | None]] = {
    f"{name.rpartition('.')[2]} {how}": (name, damage)
    for name in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length")
    for how, damage in {
        "missing": None, "0": whole(0), "negative": whole(-2), "huge": value(2**63, Kind.UINT64),
        "text": text("many"), "fraction": real(2.5), "truth": value(True, Kind.BOOL),
        "texts": value(["a", "b"], Kind.ARRAY, Kind.STRING),
    }.items()
}  # fmt: skip
"""What is damaged -> a key of the architecture, and what stands there."""
WRONG |= {
    "no KV heads": ("attention.head_count_kv", whole(0)),
    "KV heads as a text": ("attention.head_count_kv", text("two")),
    "more KV heads than heads": ("attention.head_count_kv", whole(4)),
    "heads of no width": ("attention.key_length", whole(0)),
    "other heads than the tensors'": ("attention.head_count", whole(4)),
    "more layers than tensors": ("block_count", whole(2**31 - 1)),
    "fewer layers than tensors": ("block_count", whole(1)),
    "another width": ("embedding_length", whole(128)),
    "another MLP": ("feed_forward_length", whole(128)),
    "no epsilon": ("attention.layer_norm_rms_epsilon", None),
    "an epsilon as a text": ("attention.layer_norm_rms_epsilon", text("small")),
    "a base of RoPE that is no number": ("rope.freq_base", real(float("nan"))),
    "a base of RoPE of 0": ("rope.freq_base", real(0.0)),
    "a base of RoPE as a text": ("rope.freq_base", text("10000")),
    "another vocabulary": ("vocab_size", whole(7)),
    "a vocabulary as a text": ("vocab_size", text("all")),
    "experts as a text": ("expert_count", text("eight")),
    "a type of RoPE that is no text": ("rope.scaling.type", whole(2)),
    "no architecture": ("general.architecture", None),
    "an architecture that is a number": ("general.architecture", whole(3)),
    "an architecture of no letters": ("general.architecture", text("\x1b[31m")),
    "parts as a text": ("split.count", text("three")),
    "parts below none": ("split.count", whole(-1)),
    "a name that is no text": ("general.name", whole(3)),
    "no tokens": ("tokenizer.ggml.tokens", None),
    "tokens that are numbers": ("tokenizer.ggml.tokens", numbers(*range(N_TOKENS))),
    "too few tokens": ("tokenizer.ggml.tokens", value(["a", "b"], Kind.ARRAY, Kind.STRING)),
    "no kind of tokenizer": ("tokenizer.ggml.model", None),
    "a kind of tokenizer that is a number": ("tokenizer.ggml.model", whole(1)),
    "an end that is no token": ("tokenizer.ggml.eos_token_id", whole(N_TOKENS)),
    "an end as a text": ("tokenizer.ggml.eos_token_id", text("<|end|>")),
    "a template that is a number": ("tokenizer.chat_template", whole(1)),
    "no merges": ("tokenizer.ggml.merges", None),
    "merges that are numbers": ("tokenizer.ggml.merges", numbers(1, 2)),
    "types of tokens as a number": ("tokenizer.ggml.token_type", whole(1)),
}

FEATURES: dict[str, tuple[str, GGUFValue, str]] = {
    "experts": ("expert_count", whole(8), "mixture of 8 experts"),
    "a sliding window": ("attention.sliding_window", whole(64), "sliding window of 64"),
    "capped scores": ("attn_logit_softcapping", real(50.0), "scores are soft-capped"),
    "capped logits": ("final_logit_softcapping", real(30.0), "logits are soft-capped"),
    "ALiBi": ("attention.max_alibi_bias", real(8.0), "ALiBi"),
    "both directions": ("attention.causal", value(False, Kind.BOOL), "not causal"),
    "MRoPE": ("rope.dimension_sections", numbers(8, 4, 4), "MRoPE"),
    "LongRoPE": ("rope.scaling.type", text("longrope"), "RoPE type is longrope"),
    "other heads in each layer": ("attention.head_count_kv", numbers(2, 1), "of different sizes"),
    "values of another width": ("attention.value_length", whole(64), "its values are 64 wide"),
    "RoPE on a part of a head": ("rope.dimension_count", whole(16), "would be taken for 16"),
    "a tokenizer of words": ("tokenizer.ggml.model", text("bert"), "of kind 'bert'"),
}
"""What neither engine serves -> a key, its value, and what is said."""

ONLY_LLAMA_CPP: dict[str, tuple[str, GGUFValue, str]] = {
    "linear RoPE": ("rope.scaling.type", text("linear"), "RoPE is scaled"),
    "YaRN": ("rope.scaling.type", text("yarn"), "RoPE is scaled"),
    "an older key of scaled RoPE": ("rope.scale_linear", real(4.0), "RoPE is scaled"),
    "scaled logits": ("logit_scale", real(0.5), "llama.logit_scale is not read"),
    "clamped activations": ("attention.clamp_kqv", real(8.0), "clamp_kqv is not read"),
}
"""What transformers leaves out of what it makes of a GGUF."""


def damaged(path: Path, name: str, damage: GGUFValue | None, arch: str = "llama") -> Path:
    """A healthy file but for one value."""
    whose = "" if name.startswith(("general.", "split.", "tokenizer.")) else f"{arch}."
    write_model(path, arch=arch, changes={f"{whose}{name}": damage})
    return path


def with_tensors(path: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    """A healthy file but for its tensors."""
    tensors = random_tensors(N_TOKENS)
    change(tensors)
    write_model(path, **tensors)
    return path
