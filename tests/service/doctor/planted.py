"""A whole machine in a folder, for probes that do not know it: programs, packages and the kernel's files, all healthy
until a fault is planted in them."""

import json
import os
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cache_store.speeds import SpeedBook
from service.doctor.findings import Finding
from service.doctor.probes import SystemProbes
from service.engine.models.card import KVGate, ModelCard, ModelDigests, save_card
from service.engine.prompt import PromptParts
from tests.service.doctor.machine import look, settings, write_model

CARD = {
    "name": "NVIDIA L4", "total": "23034", "used": "310", "driver": "580.65", "capability": "8.9", "celsius": "55",
    "throttle": "0x0000000000000001", "width": "16", "persistence": "Enabled",
}  # fmt: skip
TORCH = """
import types
__version__ = "2.11.0+cu130"
version = types.SimpleNamespace(cuda="13.0")
cuda = types.SimpleNamespace(is_available=lambda: True)
_C = types.SimpleNamespace(_cuda_getArchFlags=lambda: "sm_75 sm_80 sm_86 sm_90 compute_90")
"""
GATE = KVGate(0.0, 0.0, 1.0, True)
UNSEEN = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST", "OMP_NUM_THREADS")
"""Variables of the real machine."""


@dataclass
class Planted:
    """The machine. What is changed before `look` is what the doctor then finds: `card` by nvidia-smi, `processes` on
    it, `files` by name, `changes` of the settings, `model` of its config."""

    root: Path
    patch: pytest.MonkeyPatch
    redis_url: str = ""
    card: dict[str, str] = field(default_factory=lambda: dict(CARD))
    processes: str = ""
    cuda: str = "13.0"
    nvcc: str = "13.0"
    languages: str = "eng osd"
    imported: bool = True
    dtype: str = "F16"
    model: dict[str, Any] = field(default_factory=dict)
    prefill_tok_s: int = 1000
    files: dict[str, str] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)

    def look(self, check: str) -> Finding:
        """What a check finds, by `SystemProbes`."""
        self._write()
        probes = SystemProbes(proc=self.root / "proc", sys_root=self.root / "sys")
        given = {"redis_url": self.redis_url, "ocr_languages": "eng"} | self.changes
        return look(check, self.root, probes, self._model(), **given)

    def _write(self) -> None:
        for name, text in (self._healthy() | self.files).items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            if path.parent.name == "bin":
                path.chmod(path.stat().st_mode | stat.S_IXUSR)
        for name in UNSEEN:
            self.patch.delenv(name, raising=False)
        self.patch.setitem(sys.modules, "pynvml", None)
        self.patch.setenv("PATH", f"{self.root / 'bin'}:/usr/bin:/bin")
        self.patch.setenv("PYTHONPATH", str(self.root / "site"))
        self.patch.setenv("TORCH_EXTENSIONS_DIR", str(self.root / "ext"))
        for name, value in self.changes.pop("environment", {}).items():
            self.patch.setenv(name, value)
        book = settings(self.root).store_dir / "speeds.json"
        book.parent.mkdir(parents=True, exist_ok=True)
        book.unlink(missing_ok=True)
        SpeedBook(book).record_prefill(self.prefill_tok_s, 1.0)

    def _healthy(self) -> dict[str, str]:
        free = int(self.card["total"]) - int(self.card["used"])
        line = (
            "0, {name}, {total}, {used}, " + str(free) + ", {driver}, {capability}, {celsius}, {throttle}, 4, 4, "
            "{width}, 16, {persistence}, 2000, 2040, GPU-1"
        ).format(**self.card)
        smi = (
            "#!/bin/sh\ncase \"$1\" in\n"
            f"  --query-gpu*) echo '{line}';;\n  --query-compute*) echo '{self.processes}';;\n"
            f"  *) echo 'CUDA Version: {self.cuda} |';;\nesac\n"
        )  # fmt: skip
        return {
            "bin/nvidia-smi": smi,
            "bin/nvcc": f"#!/bin/sh\necho 'Cuda compilation tools, release {self.nvcc}, V1'\n",
            "bin/tesseract": f"#!/bin/sh\nprintf '%s\\n' {self.languages}\n",
            "site/torch.py": TORCH,
            "site/exllamav2/__init__.py": "",
            "site/exllamav2-0.3.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: exllamav2\nVersion: 0.3.2\n",
            "site/exllamav2_ext.py": "",
            "ext/py311_cu130/exllamav2_ext/build.ninja": "cuda_cflags = -gencode=arch=compute_89,code=sm_89\n",
            "proc/meminfo": "MemAvailable: 8000000 kB\nSwapTotal: 4000000 kB\nSwapFree: 4000000 kB\n",
            "proc/cpuinfo": "flags : avx2 avx512_bf16\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq\n",
        }

    def _model(self) -> Path:
        directory = self.root / "models" / "big"
        if not directory.exists():
            write_model(directory, self.dtype, **self.model)
            if self.imported:
                save_card(model_card(directory), directory)
        return directory

    def add_draft_model(self, n_parameters: int = 51_200, vocab: dict[str, int] | None = None) -> None:
        """A model beside it that guesses, named in the settings; with other tokens where `vocab` is given."""
        directory = self.root / "models" / "small"
        write_model(directory)
        card = msgspec.structs.replace(model_card(directory), name="small", n_parameters=n_parameters)
        if vocab is not None:
            for place, pieces in ((self._model(), {"a": 0}), (directory, vocab)):
                (place / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces, "merges": []}}))
            digests = msgspec.structs.replace(card.digests, tokenizer="1" * 32)
            card = msgspec.structs.replace(card, digests=digests)
        save_card(card, directory)
        self.changes["draft_model"] = str(directory)


def model_card(directory: Path) -> ModelCard:
    """As an import writes it."""
    config = json.loads((directory / "config.json").read_text())
    files = {path.name: path.stat().st_size for path in directory.iterdir()}
    return ModelCard(
        1, "big", "here", "llama", config["num_hidden_layers"], config["num_attention_heads"],
        config["num_key_value_heads"], config["head_dim"], config["max_position_embeddings"], config["vocab_size"],
        512_000, "float16", [2], "none", ModelDigests(*("0" * 32,) * 5), PromptParts(*("",) * 5), files,
        {"k8v8": GATE, "k8v4": GATE, "k4v4": GATE},
    )  # fmt: skip


def cores() -> int:
    """Of the real machine, which the threads check asks."""
    return len(os.sched_getaffinity(0))
