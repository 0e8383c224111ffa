"""exllamav2's own converter, as far as it goes without a card: its Python as it is, over a stand-in for its extension.

Runs where exllamav2 is installed, or unpacked on PYTHONPATH: `pip download --no-deps exllamav2==0.3.2`, `unzip`.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from service.engine.models.card import ModelCard
from service.engine.models.convert import work
from service.engine.models.convert.convert import Tools, Wanted, convert_model
from service.engine.models.convert.process import run_child
from service.engine.models.convert.record import read_conversion
from service.engine.models.convert.request import Rows
from service.engine.models.source import Progress
from tests.service.engine.models.convert import on_cpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("exllamav2") is None or torch.cuda.is_available(), reason="no exllamav2, or a card"),
]
CHILD = (sys.executable, str(Path(on_cpu.__file__)))


@pytest.fixture(scope="module")
def plain(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for the converter's groups of 128, and less excitable than random weights usually are."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.05}
    return make_model(tmp_path_factory.mktemp("plain") / "wide", **sizes)


def logits(model: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def dequantized(directory: Path) -> Any:
    """The converted weights written out, in the plain model's place."""
    tensors = {k: t for path in directory.glob("*.safetensors") for k, t in load_file(path).items()}
    plain = {name: tensor.float() for name, tensor in tensors.items() if name.endswith(".weight")}
    for name in [n.removesuffix(".q_weight") for n in tensors if n.endswith(".q_weight")]:
        parts = {p: tensors[f"{name}.{p}"] for p in ("q_weight", "q_invperm", "q_scale", "q_scale_max", "q_groups")}
        plain[f"{name}.weight"] = on_cpu.unpack(parts).T.float()
    return plain


def predict(source: Path, directory: Path, card: ModelCard, texts: Any) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, tie_word_embeddings=False)
    model.load_state_dict({k: v[: card.vocab_size] if "head" in k else v for k, v in dequantized(directory).items()})
    return [logits(model, ids)[15:] for ids in texts]


def convert(source: Path, tmp_path: Path, child: Any, **changes: Any) -> ModelCard:
    tools = Tools(
        converter=lambda: "exllamav2 0.3.2", check_room=lambda *_: None, run_child=child,
        predict=partial(predict, source), measure=lambda *_: {}, find_heads=lambda *_: None,
    )  # fmt: skip
    wanted = Wanted(**{"bits": 6.0, "rows": Rows(6, 96, 2), "most_kl": 20.0} | changes)
    return convert_model(
        source,
        wanted,
        name="made",
        models_dir=tmp_path / "models",
        work_dir=tmp_path / "work",
        tools=tools,
        replace=True,
    )


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def test_a_model_is_converted_gone_on_with_and_like_its_source(plain: Path, tmp_path: Path) -> None:
    stages: list[str] = []

    def killed_while_it_quantizes(directory: Path, progress: Progress) -> None:
        def until(stage: str, done: int, total: int) -> None:
            stages.append(stage)
            if stage.startswith("quantizing"):
                raise KeyboardInterrupt

        run_child(directory, until, CHILD)

    with pytest.raises(KeyboardInterrupt):
        convert(plain, tmp_path, killed_while_it_quantizes)
    job = work.read_job(tmp_path / "work")
    assert job is not None
    assert job["progress"] == "quantize"
    told = list(dict.fromkeys(stages))
    assert told[0] == "predicting with the source"
    assert told[1].startswith("measuring")

    later: list[str] = []
    kept: dict[str, Tensor] = {}

    def to_its_end(directory: Path, progress: Progress) -> None:
        run_child(directory, lambda stage, *_: later.append(stage), CHILD)
        kept.update(load_file(directory / work.REFERENCE_NAME))
        kept.update({f"ids.{k}": v for k, v in load_file(directory / work.HELD_OUT_NAME).items()})

    measured = tmp_path / "measured.json"
    card = convert(plain, tmp_path, to_its_end, measurement=measured)
    assert not any(stage.startswith(("measuring", "predicting")) for stage in later)
    made = read_conversion(tmp_path / "models" / "made")
    assert made is not None
    assert card.quantization == "exl2-6.0bpw"
    assert made.likeness.mean_kl < 0.01

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for name in (name for name in kept if not name.startswith("ids.")):
        expected = logits(model, kept[f"ids.{name}"][0].tolist())
        assert (kept[name].float() - expected).abs().max() < 0.05, "the reference is what transformers computes"

    convert(plain, tmp_path, partial(run_child, command=CHILD), bits=3.0, measurement=measured)
    smaller = read_conversion(tmp_path / "models" / "made")
    assert smaller is not None
    assert smaller.likeness.mean_kl > 3 * made.likeness.mean_kl
