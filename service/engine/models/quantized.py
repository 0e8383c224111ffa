"""Directories with EXL2 or GPTQ weights: recognized, checked and kept as they are. Reading them is exllamav2's work.

Needs no torch. What is checked are the conditions under which exllamav2 0.3.2 reads such weights rightly: it does not
check all of them itself.
"""

import json
import os
import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from service.engine.models.errors import SourceRefused
from service.engine.models.weights import TensorSpan, tensor_spans

METHODS = ("exl2", "gptq")
INDEX_NAME = "model.safetensors.index.json"
_OLD_GPTQ = "quantize_config.json"
_FORMATS = ("gptq", "gptq_v2")

Modules = dict[str, dict[str, TensorSpan]]
"""Name of a linear, a norm or an embedding -> part -> tensor."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How weights are stored: `settings` is a config's `quantization_config`."""

    method: str
    settings: dict[str, Any]

    @property
    def label(self) -> str:
        """Such as "exl2-4.0bpw", "gptq-4bit-128g-actorder" or "gguf-MOSTLY_Q4_K_M"."""
        bits = self.settings.get("bits")
        if self.method == "gguf":
            return f"gguf-{self.settings['file_type']}"
        if self.method == "exl2":
            return f"exl2-{float(bits):.2f}".removesuffix("0") + "bpw" if bits else "exl2"
        size = self.settings.get("group_size", -1)
        group = f"-{size}g" if isinstance(size, int) and size > 0 else ""
        order = "-actorder" if self.settings.get("desc_act") else ""
        return f"gptq-{bits}bit{group}{order}"


def find_quantization(directory: Path) -> Quantization | None:
    """What a directory's `config.json`, or the `quantize_config.json` of older GPTQ models, says; None for plain
    weights. Raises SourceRefused for a method that is not read."""
    settings = _json(directory / "config.json").get("quantization_config")
    if not settings and (directory / _OLD_GPTQ).is_file():
        settings = _json(directory / _OLD_GPTQ) | {"quant_method": "gptq"}
    if not settings:
        return None
    method = str(settings.get("quant_method", "unknown")).lower()
    if method not in METHODS:
        raise SourceRefused(
            f"the weights in {directory} are quantized as {method}: import plain ones, a GGUF, EXL2 or GPTQ"
        )
    return Quantization(method, settings)


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SourceRefused(f"{path} cannot be read as JSON: {error}") from error
    return document if isinstance(document, dict) else {}


def modules_of(spans: list[TensorSpan]) -> Modules:
    """Tensors by the module they belong to."""
    modules: Modules = {}
    for span in spans:
        module, _, part = span.name.rpartition(".")
        modules.setdefault(module, {})[part] = span
    return modules


def n_elements(parts: dict[str, TensorSpan]) -> int:
    """Parameters of a module, quantized or not."""
    if "q_weight" in parts:
        return parts["q_invperm"].shape[0] * parts["q_weight"].shape[1] + _plain(parts, "bias")
    if "qweight" in parts:
        return prod(parts["qweight"].shape) * 8 + _plain(parts, "bias")
    return _plain(parts, *parts)


def _plain(parts: dict[str, TensorSpan], *names: str) -> int:
    return sum(prod(parts[name].shape) for name in names if name in parts)


def is_quantized(parts: dict[str, TensorSpan]) -> bool:
    """Whether a module's weights are EXL2 or GPTQ ones."""
    return "q_weight" in parts or "qweight" in parts


def check_weights(directory: Path, quantization: Quantization, n_layers: int) -> int:
    """The number of parameters of a quantized directory. Raises SourceRefused, naming the tensor, for what exllamav2
    would not read, or would read as other weights."""
    modules = modules_of(tensor_spans(directory))
    if not any(is_quantized(parts) for parts in modules.values()):
        raise SourceRefused(f"{directory} is said to be {quantization.label}, but no tensor in it is quantized")
    if quantization.method == "gptq":
        _check_gptq(quantization)
    for name, parts in modules.items():
        _check_module(name, parts)
    for layer in range(n_layers):
        _check_layer(f"model.layers.{layer}.", modules)
    return sum(n_elements(parts) for parts in modules.values())


def _check_gptq(quantization: Quantization) -> None:
    settings = quantization.settings
    if settings.get("bits") != 4:
        raise SourceRefused(f"GPTQ weights of {settings.get('bits')} bits are not read, only those of 4 bits")
    kind = settings.get("checkpoint_format") or "gptq"
    if kind not in _FORMATS:
        raise SourceRefused(f"GPTQ weights in the format {kind} are not read, only {' and '.join(_FORMATS)}")


def _check_module(name: str, parts: dict[str, TensorSpan]) -> None:
    needed = ()
    if "q_weight" in parts:
        needed = ("q_invperm", "q_scale", "q_scale_max", "q_groups")
    elif "qweight" in parts:
        needed = ("qzeros", "scales")
    if missing := [part for part in needed if part not in parts]:
        raise SourceRefused(f"the quantized weights {name} lack {', '.join(missing)}")
    if "qweight" in parts:
        _check_groups(name, parts)


def _check_groups(name: str, parts: dict[str, TensorSpan]) -> None:
    """exllamav2 takes the smallest power of two that covers the inputs as the size of a group, at least 32."""
    n_in, n_out = parts["qweight"].shape[0] * 8, parts["qweight"].shape[1]
    groups = parts["scales"].shape[0]
    size = 1
    while size * groups < n_in:
        size *= 2
    fits = size >= 32 and (size >= n_in or -(-n_in // size) == groups)
    if not fits or parts["scales"].shape[1] != n_out or parts["qzeros"].shape != (groups, n_out // 8):
        raise SourceRefused(
            f"the GPTQ weights {name} are not in groups that exllamav2 reads (a power of two, 32 or more)"
        )


def _check_layer(prefix: str, modules: Modules) -> None:
    """exllamav2 computes attention and MLP of a layer either quantized or plain."""
    for part in ("self_attn.", "mlp."):
        linears = {name: parts for name, parts in modules.items() if name.startswith(prefix + part)}
        kinds = {name: is_quantized(parts) for name, parts in linears.items() if name.endswith("_proj")}
        if not kinds:
            raise SourceRefused(f"the weights {prefix}{part}* are missing")
        if len(set(kinds.values())) > 1:
            plain = next(name for name, quantized in kinds.items() if not quantized)
            raise SourceRefused(f"some weights of {prefix}{part}* are quantized and some are not, such as {plain}")


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model: those its index names, else all."""
    named = _json(directory / INDEX_NAME).get("weight_map")
    if not named:
        return sorted(directory.glob("*.safetensors"))
    files = sorted({directory / name for name in named.values()})
    if outside := [path for path in files if path.parent != directory or not path.is_file()]:
        raise SourceRefused(f"{directory / INDEX_NAME} names {outside[0].name}, which is not there")
    return files


def keep_files(source: Path, quantization: Quantization, directory: Path) -> None:
    """Put the weights and the config of `source` into `directory`: weights as hard links where the disk allows it, the
    settings of an older GPTQ model into its config, where exllamav2 looks for them."""
    for path in weight_files(source):
        link(path, directory / path.name)
    config = _json(source / "config.json")
    if "quantization_config" in config:
        shutil.copyfile(source / "config.json", directory / "config.json")
    else:
        (directory / "config.json").write_text(
            json.dumps(config | {"quantization_config": quantization.settings}, indent=1)
        )
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", directory / "generation_config.json")


def link(source: Path, target: Path) -> None:
    """A hard link where the disk allows it, else a copy."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
