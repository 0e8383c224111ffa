"""A converter that only pretends."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from service.engine.models.convert import work
from service.engine.models.convert.convert import Tools
from service.engine.models.source import Progress
from tests.service.engine.models.packed import exl2_parts


class PretendedConverter:
    """Stands in for the converting process: packed weights of zeros, and predictions by chance in the source's place.

    `breaks`: how often it ends before it is done. `drift`: of the converted predictions.
    """

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.breaks = 0
        self.drift = 0.05

    def run(self, directory: Path, progress: Progress) -> None:
        job = work.read_job(directory)
        self.runs.append("begun" if job is None else "gone on")
        work.save_job(directory, job or {"progress": "measure"})
        progress("measuring choices (1 of 2)", 1, 2)
        if self.breaks:
            self.breaks -= 1
            raise KeyboardInterrupt
        request = work.load_request(directory)
        held_out = load_file(directory / work.HELD_OUT_NAME)
        vocabulary = json.loads((Path(request.source) / "config.json").read_bytes())["vocab_size"]
        save_file({k: self.logits(ids[0], vocabulary) for k, ids in held_out.items()}, directory / work.REFERENCE_NAME)
        (directory / work.MEASURED_NAME).write_text(json.dumps({"measurement": {"layer": 1}, "last_module_idx": 3}))
        (directory / work.RESULT_NAME).mkdir()
        save_file(packed(Path(request.source)), directory / work.RESULT_NAME / "output.safetensors")

    @staticmethod
    def logits(ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(ids))
        return torch.randn(len(ids), vocabulary, generator=generator).half()

    def predict(self, directory: Path, card: Any, texts: Any) -> list[torch.Tensor]:
        found = [self.logits(torch.tensor(ids), card.vocab_size).float() for ids in texts]
        return [x[15:] + self.drift * torch.randn(x[15:].shape, generator=torch.manual_seed(1)) for x in found]

    def tools(self, **changes: Any) -> Tools:
        given: dict[str, Any] = {
            "converter": lambda: "exllamav2 0.3.2", "check_room": lambda *_: None, "run_child": self.run,
            "predict": self.predict, "measure": lambda *_: {}, "find_heads": lambda *_: None,
        }  # fmt: skip
        return Tools(**given | changes)


def packed(source: Path) -> dict[str, torch.Tensor]:
    """The linears of a model in EXL2's form, all zero, and the rest as it is."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj" not in name:
            tensors[name] = tensor.half()
            continue
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": t for part, t in exl2_parts(*tensor.shape).items()}
    return tensors


@pytest.fixture
def converter() -> PretendedConverter:
    return PretendedConverter()
