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

from service.engine.models.configs import FLAG, NUMBER, OBJECT, TEXT, Kind, check_value, read_object, whole
from service.engine.models.errors import ModelDamaged, SourceRefused
from service.engine.models.weights import TensorSpan, tensor_spans

METHODS = ("exl2", "gptq")
INDEX_NAME = "model.safetensors.index.json"
_ONE_NAME = "model.safetensors"
_INDEX_NBYTES = 64 << 20
_FILE_NAMES = Kind(
    "a table of tensors and the files they are in",
    lambda v: (
        isinstance(v, dict) and bool(v) and all(isinstance(n, str) and n.endswith(".safetensors") for n in v.values())
    ),
)
_OLD_GPTQ = "quantize_config.json"
_FORMATS = ("gptq", "gptq_v2")

_EXL2_PARTS = {"q_weight": 2, "q_invperm": 1, "q_scale": 2, "q_scale_max": 1, "q_groups": 1}
_GPTQ_PARTS = {"qweight": 2, "qzeros": 2, "scales": 2}
"""Part -> dimensions."""
_SETTINGS: dict[str, dict[str, Kind]] = {
    "exl2": {"bits": Kind("a number from 1 to 16", lambda v: NUMBER.fits(v) and 1 <= v <= 16)},
    "gptq": {"bits": whole(1, 16), "group_size": whole(-1, 1 << 20), "desc_act": FLAG, "checkpoint_format": TEXT},
}

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
    path = directory / "config.json"
    settings = _object(path).get("quantization_config")
    if not settings and (directory / _OLD_GPTQ).is_file():
        path = directory / _OLD_GPTQ
        settings = _object(path) | {"quant_method": "gptq"}
    if not settings:
        return None
    check_value(path, "quantization_config", settings, OBJECT)
    method = str(settings.get("quant_method", "unknown")).lower()
    if method not in METHODS:
        raise SourceRefused(
            f"the weights in {directory} are quantized as {method[:40]}: import plain ones, a GGUF, EXL2 or GPTQ"
        )
    for key, kind in _SETTINGS[method].items():
        if settings.get(key) is not None:
            check_value(path, key, settings[key], kind)
    return Quantization(method, settings)


def _object(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}


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


def source_spans(directory: Path, quantization: Quantization | None) -> list[TensorSpan]:
    """The tensors of a model that shall be imported, of those files that an import reads. Raises SourceRefused for
    files that are missing or damaged."""
    files = weight_files(directory)
    if quantization is None and files:
        files = _plain_files(directory, files)
    try:
        return tensor_spans(directory, files)
    except ModelDamaged as error:
        raise SourceRefused(str(error)) from None


def _plain_files(directory: Path, files: list[Path]) -> list[Path]:
    """As transformers chooses them."""
    if (one := directory / _ONE_NAME).is_file():
        return [one]
    if not (directory / INDEX_NAME).is_file():
        raise SourceRefused(
            f"{directory} has neither {_ONE_NAME} nor {INDEX_NAME}, which says whether {files[0].name} is of the model"
        )
    return files


def check_plain(directory: Path, modules: Modules) -> None:
    """Raises SourceRefused for quantized weights of which no config says how."""
    if found := [name for name, parts in modules.items() if is_quantized(parts)]:
        raise SourceRefused(
            f"the weights {found[0]} in {directory} are quantized, but its config.json has no quantization_config that "
            "says how: take the one that they came with"
        )


def check_weights(directory: Path, quantization: Quantization, n_layers: int) -> int:
    """The number of parameters of a quantized directory. Raises SourceRefused, naming the tensor, for what exllamav2
    would not read, or would read as other weights."""
    modules = modules_of(source_spans(directory, quantization))
    check_parts(modules)
    check_modules(directory, modules, quantization, n_layers)
    return sum(n_elements(parts) for parts in modules.values())


def check_parts(modules: Modules) -> None:
    """Raises SourceRefused for a module of whose quantized weights a part is missing or has no shape of its kind."""
    for name, parts in modules.items():
        if is_quantized(parts):
            _check_module(name, parts)


def check_modules(directory: Path, modules: Modules, quantization: Quantization, n_layers: int) -> None:
    """`check_weights` of modules whose parts were checked."""
    if not any(is_quantized(parts) for parts in modules.values()):
        raise SourceRefused(f"{directory} is said to be {quantization.label}, but no tensor in it is quantized")
    if quantization.method == "gptq":
        _check_gptq(quantization)
    for name, parts in modules.items():
        if "qweight" in parts:
            _check_groups(name, parts)
    for layer in range(n_layers):
        _check_layer(f"model.layers.{layer}.", modules)


def _check_gptq(quantization: Quantization) -> None:
    settings = quantization.settings
    if settings.get("bits") != 4:
        raise SourceRefused(f"GPTQ weights of {settings.get('bits')} bits are not read, only those of 4 bits")
    kind = settings.get("checkpoint_format") or "gptq"
    if kind not in _FORMATS:
        raise SourceRefused(f"GPTQ weights in the format {kind} are not read, only {' and '.join(_FORMATS)}")


def _check_module(name: str, parts: dict[str, TensorSpan]) -> None:
    needed = _EXL2_PARTS if "q_weight" in parts else _GPTQ_PARTS
    if missing := [part for part in needed if part not in parts]:
        raise SourceRefused(f"the quantized weights {name} lack {', '.join(missing)}")
    if odd := [part for part, rank in needed.items() if len(parts[part].shape) != rank]:
        raise SourceRefused(f"the quantized weights {name} have {odd[0]} of the shape {parts[odd[0]].shape}")


def _check_groups(name: str, parts: dict[str, TensorSpan]) -> None:
    """exllamav2 takes the smallest power of two that covers the inputs as the size of a group, at least 32."""
    n_in, n_out = parts["qweight"].shape[0] * 8, parts["qweight"].shape[1]
    groups = parts["scales"].shape[0]
    size = 1
    while groups and size * groups < n_in:
        size *= 2
    fits = groups and size >= 32 and (size >= n_in or -(-n_in // size) == groups)
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
    path = directory / INDEX_NAME
    if not path.is_file():
        return sorted(directory.glob("*.safetensors"))
    named: Any = read_object(path, _INDEX_NBYTES).get("weight_map")
    check_value(path, "weight_map", named, _FILE_NAMES)
    files = sorted({directory / name for name in named.values()})
    if not any(file.is_file() for file in files) and (others := sorted(directory.glob("output*.safetensors"))):
        return others  # exllamav2's converter copies the index of what it converted, and names its own files so
    if outside := [file for file in files if file.parent != directory or not file.is_file()]:
        raise SourceRefused(f"{path} names {outside[0].name[:100]}, which is not there")
    return files


def keep_files(source: Path, quantization: Quantization, directory: Path) -> None:
    """Put the weights and the config of `source` into `directory`: weights as hard links where the disk allows it, the
    settings of an older GPTQ model into its config, where exllamav2 looks for them."""
    for path in weight_files(source):
        link(path, directory / path.name)
    config = _object(source / "config.json")
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
