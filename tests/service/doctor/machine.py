"""A healthy machine to plant faults in."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from service.doctor.examine import examine
from service.doctor.facts import MemoryFacts, RedisFacts, TorchFacts
from service.doctor.findings import Finding
from service.planning.nvidia import CardState
from service.settings import Settings

GIB = 1 << 30
CARD = CardState(
    0, "NVIDIA L4", 22 * GIB, GIB // 2, 22 * GIB - GIB // 2, "580.65", cuda=(13, 0), capability=(8, 9),
    temperature_c=55, pcie_gen=4, pcie_max_gen=4, pcie_width=16, pcie_max_width=16, persistence=True, sm_mhz=2000,
    max_sm_mhz=2040,
)  # fmt: skip
HELD = MemoryFacts(32 * GIB, 0, 0, {})
REDIS = RedisFacts("7.2.10", 2 * GIB, "noeviction", appendonly=False, save="", used_nbytes=0)
TORCH = TorchFacts("2.11.0+cu130", "13.0", ["sm_75", "sm_80", "sm_86", "sm_90", "compute_90"], True, "0.3.2")
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1000,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass
class Machine:
    """`Probes` whose facts can be changed; healthy as it is made. `found_at`: of a Redis by its URL, else `found`."""

    states: list[CardState] = field(default_factory=lambda: [CARD])
    installed: TorchFacts = TORCH
    llama: list[str] | None = field(default_factory=lambda: ["cuda"])
    extension: list[str] = field(default_factory=lambda: ["sm_89"])
    compiler: str = "13.0"
    held: MemoryFacts = HELD
    clocks: set[str] = field(default_factory=lambda: {"performance"})
    n_cores: float = 8.0
    n_threads: int = 8
    engines: int = 0
    flags: set[str] = field(default_factory=lambda: {"avx512_bf16"})
    gbps: float = 2.0
    found: RedisFacts = REDIS
    found_at: dict[str, RedisFacts] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    def cards(self) -> list[CardState]:
        return self.states

    def torch(self) -> TorchFacts:
        return self.installed

    def llama_backends(self) -> list[str] | None:
        return self.llama

    def extension_archs(self) -> list[str]:
        return self.extension

    def nvcc(self) -> str:
        return self.compiler

    def memory(self) -> MemoryFacts:
        return self.held

    def governors(self) -> set[str]:
        return self.clocks

    def cores(self) -> float:
        return self.n_cores

    def default_threads(self) -> int:
        return self.n_threads

    def engines_nbytes(self) -> int:
        return self.engines

    def processor_flags(self) -> set[str]:
        return self.flags

    def read_gbps(self, directory: Path) -> float:
        return self.gbps

    def redis(self, url: str) -> RedisFacts:
        return self.found_at.get(url, self.found)

    def environment(self) -> Mapping[str, str]:
        return self.variables


def write_model(directory: Path, dtype: str = "F16", **changes: Any) -> Path:
    """A directory with a config and the header of one plain weight, without what an import adds. Where its config says
    that it is a GPTQ model, its layers are there too."""
    directory.mkdir(parents=True)
    config = CONFIG | changes
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": (dtype, 2, [1000, 512])}
    if (config.get("quantization_config") or {}).get("quant_method") == "gptq":
        for layer in range(config["num_hidden_layers"]):
            tensors |= _gptq(f"model.layers.{layer}.self_attn.o_proj") | _gptq(f"model.layers.{layer}.mlp.down_proj")
    header, end = {}, 0
    for name, (kind, itemsize, shape) in tensors.items():
        first, end = end, end + itemsize * prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [first, end]}
    encoded = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(end))
    return directory


def _gptq(name: str) -> dict[str, tuple[str, int, list[int]]]:
    parts = {"qweight": ("I32", 4, [64, 512]), "qzeros": ("I32", 4, [4, 64]), "scales": ("F16", 2, [4, 512])}
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}


def settings(tmp_path: Path, **changes: Any) -> Settings:
    given = {"engine": "exl2", "data_dir": tmp_path / "data", "host_bytes": 1 << 20, "free_floor_bytes": 0}
    return Settings(**given | changes)


def look(check: str, tmp_path: Path, machine: Any, model_dir: Path | None = None, **changes: Any) -> Finding:
    """What one check finds."""
    (found,) = examine(settings(tmp_path, **changes), machine, model_dir=model_dir, only=[check]).findings
    return found
