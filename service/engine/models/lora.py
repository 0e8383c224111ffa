"""Merge a PEFT LoRA adapter into the weights: ``W += scale * B @ A`` per target module (Hu et al., 2021).

`scale` is alpha / r, or alpha / sqrt(r) for rank-stabilized LoRA. The product is added in float32. What PEFT
can do beyond that is refused by name: an adapter merged only in part would answer wrongly without any error.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from service.engine.models.errors import AdapterRefused
from service.engine.models.source import Progress

_PREFIX = "base_model.model."
_REFUSED_SETTINGS = (
    "use_dora",
    "use_qalora",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "megatron_config",
    "corda_config",
    "eva_config",
)


def merge_adapter(tensors: dict[str, torch.Tensor], adapter_dir: Path, progress: Progress) -> int:
    """Merge the adapter in `adapter_dir` into `tensors` (by parameter name). Gives the number of merged
    weights.

    Raises AdapterRefused, before anything was changed, when the adapter uses a feature that is not merged,
    names a module that the model does not have, or has matrices of other shapes.
    """
    pairs = read_adapter(adapter_dir, {name: weight.shape for name, weight in tensors.items()})
    for done, (name, pair) in enumerate(pairs.items()):
        weight = tensors[name]
        tensors[name] = (weight.float() + pair.delta()).to(weight.dtype)
        progress("merging", done + 1, len(pairs))
    return len(pairs)


@dataclass(frozen=True, slots=True)
class LowRank:
    """The matrices of one weight and what their product is multiplied by."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def delta(self) -> torch.Tensor:
        """What is added to the weight, in float32."""
        return self.scale * (self.b.float() @ self.a.float())


def read_adapter(adapter_dir: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, LowRank]:
    """Weight name -> its matrices, for a model with weights of `shapes`. Raises AdapterRefused as `merge_adapter`."""
    scale, rank = _settings(adapter_dir)
    pairs = _pairs(adapter_dir)
    for name, (a, b) in pairs.items():
        _check_shapes(name, shapes.get(name), a, b, rank)
    return {name: LowRank(a, b, scale) for name, (a, b) in pairs.items()}


def check_adapter(adapter_dir: Path) -> None:
    """Raises AdapterRefused for what no model could be merged with, before any is read."""
    _settings(adapter_dir)
    _path(adapter_dir)


def _settings(adapter_dir: Path) -> tuple[float, int]:
    try:
        settings: dict[str, Any] = json.loads((adapter_dir / "adapter_config.json").read_bytes())
        rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise AdapterRefused(f"{adapter_dir} has no readable adapter_config.json: {error!r}") from error
    if settings.get("peft_type") != "LORA":
        raise AdapterRefused(f"{adapter_dir} is an adapter of type {settings.get('peft_type')}, only LORA is merged")
    used = [key for key in _REFUSED_SETTINGS if settings.get(key)]
    if settings.get("bias", "none") != "none":
        used.append(f"bias={settings['bias']}")
    if used:
        raise AdapterRefused(f"{adapter_dir} uses {', '.join(used)}, which is not merged")
    if rank < 1:
        raise AdapterRefused(f"{adapter_dir} has rank {rank}")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank), rank


def _path(adapter_dir: Path) -> Path:
    path = adapter_dir / "adapter_model.safetensors"
    if not path.is_file():
        raise AdapterRefused(f"{adapter_dir} has no adapter_model.safetensors (pickled adapters are not read)")
    return path


def _pairs(adapter_dir: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Weight name -> (A, B). Adapter keys are ``base_model.model.<module>.lora_A[.default].weight``."""
    path = _path(adapter_dir)
    try:
        stored = load_file(path)
    except Exception as error:  # safetensors raises its own type, derived from Exception
        raise AdapterRefused(f"{path} cannot be read: {error}") from error
    sides: dict[str, dict[str, torch.Tensor]] = {"lora_A": {}, "lora_B": {}}
    for key, tensor in stored.items():
        module, side = _parse_key(key)
        sides[side][module] = tensor
    if sides["lora_A"].keys() != sides["lora_B"].keys() or not stored:
        raise AdapterRefused(f"{path} does not hold a pair of matrices for every module")
    return {f"{module}.weight": (a, sides["lora_B"][module]) for module, a in sides["lora_A"].items()}


def _parse_key(key: str) -> tuple[str, str]:
    module, _, rest = key.removeprefix(_PREFIX).rpartition(".lora_")
    side = f"lora_{rest.split('.')[0]}"
    if not module or rest not in ("A.weight", "B.weight", "A.default.weight", "B.default.weight"):
        raise AdapterRefused(f"the adapter holds {key}, which is not a LoRA matrix of a linear layer")
    return module, side


def _check_shapes(name: str, shape: Sequence[int] | None, a: torch.Tensor, b: torch.Tensor, rank: int) -> None:
    if shape is None:
        raise AdapterRefused(f"the adapter targets {name}, which the model does not have")
    if a.shape != (rank, shape[-1]) or b.shape != (shape[0], rank) or len(shape) != 2:
        raise AdapterRefused(
            f"the adapter's matrices for {name} are A {tuple(a.shape)} and B {tuple(b.shape)}; "
            f"rank {rank} and a weight of {tuple(shape)} need others"
        )
