"""A decoder's config as transformers reads it, without transformers, which takes seconds to load: for what is told of a
directory before anything is loaded. A test holds it against transformers'."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from service.engine.models.configs import CONFIG_NAME, NUMBER, POSITIVE, TEXT, check_value, read_config, shown, whole
from service.engine.models.errors import SourceRefused

_QWEN: dict[str, Any] = {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "phi3": {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
    "smollm3": {
        "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True,
        "use_sliding_window": False, "rope_theta": 2e6, "no_rope_layer_interval": 4,
    },
    "olmo2": {"max_position_embeddings": 2048},
    "granite": {"max_position_embeddings": 2048},
}  # fmt: skip
"""Of transformers, where a config says nothing."""
_THETA = 10_000.0
_EVEN_WIDTHS = ("llama",)
"""Types of which transformers refuses a width that the heads do not divide, whatever their own width is."""
_ORIGINAL = "original_max_position_embeddings"
_NEEDED = {
    "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor", _ORIGINAL),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
}  # fmt: skip
_ROPE = {
    "rope_type": TEXT, "type": TEXT, "rope_theta": POSITIVE, "factor": POSITIVE, "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE, "partial_rotary_factor": POSITIVE, "attention_factor": NUMBER, "beta_fast": POSITIVE,
    "beta_slow": POSITIVE, "mscale": NUMBER, "mscale_all_dim": NUMBER,
    _ORIGINAL: whole(1, 1 << 32),
}  # fmt: skip


def read_decoder(directory: Path) -> SimpleNamespace:
    """The config of a directory, with what transformers takes where it says nothing. Raises as `read_config`, and
    SourceRefused for sizes that do not go together."""
    return decoder_of(read_config(directory), directory / CONFIG_NAME)


def decoder_of(config: dict[str, Any], path: Path) -> SimpleNamespace:
    """The same of a config that was read from `path`. Of a type that is not served only its sizes are right."""
    kind = config["model_type"]
    if kind == "mistral" and "layer_types" in config:
        kind = "ministral"  # as transformers takes it
    decoder = SimpleNamespace(**{"tie_word_embeddings": False, **_DEFAULTS.get(kind, {}), **config, "model_type": kind})
    decoder.num_key_value_heads = getattr(decoder, "num_key_value_heads", None) or decoder.num_attention_heads
    decoder.max_position_embeddings = getattr(decoder, "max_position_embeddings", 0)
    _check_heads(decoder, path)
    _set_windows(decoder, path)
    decoder.rope_parameters = _rope(decoder, config, path)
    return decoder


def _check_heads(decoder: SimpleNamespace, path: Path) -> None:
    heads, kv_heads, hidden = decoder.num_attention_heads, decoder.num_key_value_heads, decoder.hidden_size
    if heads % kv_heads:
        raise SourceRefused(f"{path}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    free = getattr(decoder, "head_dim", None) and decoder.model_type not in _EVEN_WIDTHS
    if hidden % heads and not free:
        raise SourceRefused(f"{path}: num_attention_heads {heads} does not divide hidden_size {hidden}")


def _set_windows(decoder: SimpleNamespace, path: Path) -> None:
    """Qwen's and SmolLM3's layers that attend through a window, where `layer_types` does not say it."""
    n_layers = decoder.num_hidden_layers
    if decoder.model_type in ("qwen2", "qwen3"):
        decoder.sliding_window = decoder.sliding_window if decoder.use_sliding_window else None
        windowed = [decoder.sliding_window is not None and i >= decoder.max_window_layers for i in range(n_layers)]
    elif decoder.model_type == "smollm3":
        interval = decoder.no_rope_layer_interval
        marks = getattr(decoder, "no_rope_layers", None) or [int((i + 1) % interval != 0) for i in range(n_layers)]
        if len(marks) < n_layers:
            raise SourceRefused(f"{path}: no_rope_layers marks {len(marks)} of {n_layers} layers")
        used = decoder.use_sliding_window and getattr(decoder, "sliding_window", None) is not None
        windowed = [bool(used and not mark) for mark in marks[:n_layers]]
    else:
        windowed = []
    if getattr(decoder, "layer_types", None) is None:
        decoder.layer_types = ["sliding_attention" if here else "full_attention" for here in windowed]
    elif len(decoder.layer_types) != n_layers:
        raise SourceRefused(f"{path}: layer_types names {len(decoder.layer_types)} of {n_layers} layers")


def _rope(decoder: SimpleNamespace, config: dict[str, Any], path: Path) -> dict[str, Any]:
    """RoPE under its newer name, complete."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if set(rope) & set(decoder.layer_types):
        return rope  # one for each kind of layer
    rope.setdefault("rope_theta", getattr(decoder, "rope_theta", _THETA))
    if (share := getattr(decoder, "partial_rotary_factor", None)) is not None:
        rope.setdefault("partial_rotary_factor", share)
    rope.setdefault("rope_type", rope.get("type", "default"))
    if decoder.model_type == "phi3" and rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"
    if rope["rope_type"] in ("llama3", "yarn"):
        rope.setdefault(_ORIGINAL, decoder.max_position_embeddings)
    _check_rope(rope, path)
    return rope


def _check_rope(rope: dict[str, Any], path: Path) -> None:
    needed = ("rope_type", "rope_theta", *_NEEDED.get(str(rope["rope_type"]), ()))
    if missing := [key for key in needed if rope.get(key) is None]:
        raise SourceRefused(f"{path}: RoPE of type {shown(rope['rope_type'])} lacks {', '.join(missing)}")
    for key, kind in _ROPE.items():
        if rope.get(key) is not None:
            check_value(path, f"RoPE's {key}", rope[key], kind)
