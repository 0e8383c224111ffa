"""On the card: exllamav2's own converter on the demo model, few rows, by the code of `preread models convert`."""

from pathlib import Path

import pytest
import torch

from service.engine.exl2_engine.predictions import card_predictions
from service.engine.models.card import load_card
from service.engine.models.convert import work
from service.engine.models.convert.convert import Tools, Wanted, convert_model
from service.engine.models.convert.likeness import SEEN_TOKENS
from service.engine.models.convert.process import run_child
from service.engine.models.convert.record import read_conversion
from service.engine.models.convert.request import Rows
from service.engine.models.gate import kl_stats

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.timeout(600)]
ROWS = Rows(8, 512, 2)
MOST_KL = 1.0
"""Of four bits: so few rows leave a small model further from its source than is published."""


class Converting:
    """Conversions of the demo model over one measurement; what the reference of the first was is kept."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source, folder
        self.stages: list[str] = []
        self.references: dict[str, torch.Tensor] = {}
        self.texts: dict[str, torch.Tensor] = {}
        self.stop_at = ""

    def run(self, directory: Path, progress: object) -> None:
        def told(stage: str, done: int, total: int) -> None:
            self.stages.append(stage)
            if self.stop_at and stage.startswith(self.stop_at):
                raise KeyboardInterrupt

        run_child(directory, told)
        from safetensors.torch import load_file

        self.references = load_file(directory / work.REFERENCE_NAME)
        self.texts = load_file(directory / work.HELD_OUT_NAME)

    def convert(self, bits: float):
        tools = Tools(run_child=self.run, measure=lambda *_: {}, find_heads=lambda *_: None)
        wanted = Wanted(bits=bits, rows=ROWS, measurement=self.folder / "measured.json", most_kl=MOST_KL)
        self.stages = []
        convert_model(
            self.source, wanted, name=f"b{bits:g}", models_dir=self.folder / "models", work_dir=self.folder / "work",
            tools=tools,
        )  # fmt: skip
        return read_conversion(self.folder / "models" / f"b{bits:g}")


@pytest.fixture(scope="module")
def converting(demo_model, tmp_path_factory):
    return Converting(demo_model, tmp_path_factory.mktemp("convert"))


@pytest.fixture(scope="module")
def four(converting):
    """Interrupted once while it quantizes, then gone on with."""
    converting.stop_at = "quantizing"
    with pytest.raises(KeyboardInterrupt):
        converting.convert(4.0)
    converting.stop_at = ""
    return converting.convert(4.0)


def test_it_goes_on_where_it_was_and_leaves_nothing_on_the_card(converting, four):
    assert not any(stage.startswith(("predicting", "measuring")) for stage in converting.stages)
    assert not (converting.folder / "work").exists()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(0) < 1 << 30  # of this process: other tests may use the card beside it


def test_it_predicts_much_as_its_source(converting, four):
    assert four.likeness.mean_kl < MOST_KL
    assert four.likeness.perplexity < 2 * four.likeness.source_perplexity
    assert load_card(converting.folder / "models" / "b4").quantization == "exl2-4.0bpw"


def test_the_source_predicts_as_the_engine_that_serves_it(converting, demo_model, four):
    """So what is calibrated on, and compared with, is attended causally and with our RoPE."""
    names = sorted(converting.texts)
    texts = [converting.texts[name][0].tolist() for name in names]
    served = card_predictions(demo_model, load_card(demo_model), texts)
    kept = [converting.references[name][SEEN_TOKENS - 1 :].float() for name in names]
    assert kl_stats(torch.cat(kept), torch.cat(served)).mean < 1e-3


def test_more_bits_are_nearer_and_take_the_same_measurement(converting, four):
    six = converting.convert(6.0)
    assert not any(stage.startswith("measuring") for stage in converting.stages)
    assert six.likeness.mean_kl < four.likeness.mean_kl / 2
    assert six.likeness.mean_kl < 0.05
