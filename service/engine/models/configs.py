"""The JSON files of a Hugging Face model directory, checked before anything believes them. Needs no torch."""

import json
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.engine.models.errors import SourceRefused
from service.engine.models.support import SUPPORTED_TYPES, check_type

CONFIG_NAME = "config.json"
_MOST_NBYTES = 16 << 20
_MOST_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value has to be, in words and as a test."""

    wanted: str
    fits: Callable[[Any], bool]


def whole(least: int, most: int) -> Kind:
    """Whole numbers; true and false are none."""
    return Kind(f"a whole number from {least} to {most:,}", lambda v: type(v) is int and least <= v <= most)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e18  # neither NaN nor infinity, which Python's JSON has


NUMBER = Kind("a number", _is_number)
POSITIVE = Kind("a number above 0", lambda v: _is_number(v) and v > 0)
FLAG = Kind("true or false", lambda v: isinstance(v, bool))
TEXT = Kind("a text", lambda v: isinstance(v, str) and bool(v))
OBJECT = Kind("an object", lambda v: isinstance(v, dict))
_TEXTS = Kind("a list of texts", lambda v: isinstance(v, list) and all(isinstance(one, str) for one in v))
_WHOLES = Kind("a list of whole numbers", lambda v: isinstance(v, list) and all(type(one) is int for one in v))
_IDS = Kind(
    "a token id or a list of them", lambda v: all(type(one) is int for one in (v if isinstance(v, list) else [v]))
)
_HOW = Kind("an object that names its quant_method", lambda v: isinstance(v, dict) and bool(v))
_NOTHING = Kind("left out: layers of different sizes are not read", lambda v: not v)

_SIZES = {
    "hidden_size": whole(1, 1 << 20),
    "intermediate_size": whole(1, 1 << 24),
    "num_hidden_layers": whole(1, 1 << 12),
    "num_attention_heads": whole(1, 1 << 14),
    "vocab_size": whole(1, 1 << 26),
}
"""What every decoder has, with the most that is believed."""
_SOME = {
    "max_position_embeddings": whole(1, 1 << 32), "max_window_layers": whole(0, 1 << 12), "use_sliding_window": FLAG,
    "no_rope_layer_interval": whole(1, 1 << 12), "original_max_position_embeddings": whole(1, 1 << 32),
    "tie_word_embeddings": FLAG, "attention_bias": FLAG, "mlp_bias": FLAG, "hidden_act": TEXT,
    "use_cache": FLAG, "initializer_range": NUMBER, "attention_dropout": NUMBER, "rms_norm_eps": POSITIVE,
    "embedding_multiplier": POSITIVE, "logits_scaling": POSITIVE,
    "residual_multiplier": POSITIVE, "attention_multiplier": POSITIVE,
}  # fmt: skip
_SOME_OR_NULL = {
    "num_key_value_heads": whole(1, 1 << 14), "head_dim": whole(1, 1 << 14), "sliding_window": whole(0, 1 << 32),
    "num_local_experts": whole(0, 1 << 16), "num_experts": whole(0, 1 << 16), "n_routed_experts": whole(0, 1 << 16),
    "attn_logit_softcapping": NUMBER, "final_logit_softcapping": NUMBER, "partial_rotary_factor": POSITIVE,
    "rope_theta": POSITIVE, "rope_scaling": OBJECT, "rope_parameters": OBJECT, "quantization_config": _HOW,
    "id2label": OBJECT, "bos_token_id": whole(0, 1 << 26), "pad_token_id": whole(-1, 1 << 26),
    "layer_types": _TEXTS, "no_rope_layers": _WHOLES, "eos_token_id": _IDS, "dtype": TEXT, "torch_dtype": TEXT,
    "per_layer_config": _NOTHING,
}  # fmt: skip


def read_object(path: Path, most_nbytes: int = _MOST_NBYTES, *, flat: bool = False) -> dict[str, Any]:
    """A file that holds one JSON object. `flat`: what lies in it is looked at by the caller, however deep.

    Raises SourceRefused, naming the file; FileNotFoundError.
    """
    if path.exists() and not path.is_file():
        raise SourceRefused(f"{path} is not a file")
    if (nbytes := path.stat().st_size) > most_nbytes:
        raise SourceRefused(f"{path} has {nbytes:,} bytes, and such a file at most {most_nbytes:,}: it is damaged")
    try:
        document = json.loads(path.read_bytes().decode())
    except ValueError as error:
        raise SourceRefused(f"{path} cannot be read as JSON: {error}") from None
    except RecursionError:
        raise SourceRefused(f"{path} cannot be read as JSON: it is nested too deeply") from None
    if not isinstance(document, dict):
        raise SourceRefused(f"{path} is not a JSON object")
    if not flat and _is_deep(document):
        raise SourceRefused(f"{path} is nested more than {_MOST_DEPTH} deep, as no such file is")
    return document


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(_MOST_DEPTH):
        lists = [value.values() if isinstance(value, dict) else value for value in level]
        level = [child for values in lists for child in values if isinstance(child, (dict, list))]
    return bool(level)


def check_value(path: Path, key: str, value: Any, kind: Kind) -> None:
    """Raises SourceRefused, naming file, key and value."""
    if not kind.fits(value):
        raise SourceRefused(f"{path}: {key} is {shown(value)}, and has to be {kind.wanted}")


def shown(value: Any) -> str:
    """A value for a message, shortened."""
    return reprlib.repr(value)


def read_config(directory: Path) -> dict[str, Any]:
    """A directory's `config.json`, in which all sizes of a decoder are numbers that can be believed. Raises
    SourceRefused, and ArchitectureRefused for a type that is not served and has its sizes elsewhere."""
    path = directory / CONFIG_NAME
    try:
        config = read_object(path)
    except (FileNotFoundError, NotADirectoryError):
        raise SourceRefused(f"{directory} has no {CONFIG_NAME}: it is not a model directory") from None
    if "model_type" not in config:
        raise SourceRefused(f"{path} lacks model_type, which says what is computed")
    check_value(path, "model_type", config["model_type"], TEXT)
    try:
        _check_sizes(path, config)
    except SourceRefused:
        check_type(config["model_type"], SUPPORTED_TYPES)
        raise
    return config


def _check_sizes(path: Path, config: dict[str, Any]) -> None:
    for key, kind in _SIZES.items():
        if key not in config:
            raise SourceRefused(f"{path} lacks {key}, a size that every decoder has")
        check_value(path, key, config[key], kind)
    for key, kind in _SOME.items():
        if key in config:
            check_value(path, key, config[key], kind)
    for key, kind in _SOME_OR_NULL.items():
        if config.get(key) is not None:
            check_value(path, key, config[key], kind)
