"""Bits to convert to: what a plan counts with, in the converter's terms."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cache_store.layout import KVType
from service.cli import main
from service.errors import Invalid
from service.planning.cards import CARDS
from service.planning.conversion import bits_that_fit, conversion_for, head_cost, layer_bits
from service.planning.detect import this_processor
from service.planning.model import Dimensions, ModelFacts, from_dimensions
from service.planning.plan import make_plan
from service.planning.report import report
from service.planning.request import Wanted
from service.planning.search import SMALL_RESERVE
from tests.service.planning.test_headers import plain, write

THEIRS = Dimensions(layers=40, kv_heads=4, head_dim=128, params_b=27, bits=16, hidden=5120, vocab=152_064)
WANTED = Wanted(context=32_768, kv_type=KVType.K8V4)


def model(**changes: float) -> ModelFacts:
    return from_dimensions(Dimensions(**{name: getattr(THEIRS, name) for name in THEIRS.__slots__} | changes))


@pytest.mark.parametrize(("head_bits", "cost"), [(2, 2.725), (4, 4.425), (6, 6.331), (8, 8.031)])
def test_bits_of_layers_leave_room_for_an_embedding_in_fp16_and_a_head(head_bits: int, cost: float) -> None:
    facts = model()
    bits = layer_bits(facts, 4.25, head_bits)
    table = 152_064 * 5120
    assert head_cost(5120, head_bits) == pytest.approx(cost, abs=0.001)
    stored = (facts.n_parameters - 2 * table) * bits + table * (16 + cost)
    assert stored <= 4.25 * facts.n_parameters < stored + 0.05 * facts.n_parameters
    assert 3.7 < bits < 4.25


def test_bits_that_cannot_be_made_are_none() -> None:
    assert layer_bits(model(), 2.2) == 0
    assert layer_bits(model(), 16.0) == 8.0


def test_a_plan_says_what_makes_the_model_that_fits() -> None:
    plan, ledger = make_plan(model(), CARDS["rtx-3090"], WANTED)
    assert plan.conversion is not None
    assert plan.conversion.bits == layer_bits(model(), plan.settings[0].bits)
    assert f"preread models convert SOURCE --bits {plan.conversion.bits:g}" in report(plan, ledger)


def test_what_fits_as_it_is_is_not_converted() -> None:
    small = from_dimensions(Dimensions(layers=28, kv_heads=4, head_dim=128, params_b=1.5, bits=16))
    plan, ledger = make_plan(small, CARDS["h200"], WANTED)
    assert plan.conversion is None
    assert "models convert" not in report(plan, ledger)
    with pytest.raises(Invalid, match=r"plain weights of .* fit H200"):
        bits_that_fit(small, CARDS["h200"], WANTED)


def test_bits_are_chosen_for_the_card_and_the_work() -> None:
    bits, setting = bits_that_fit(model(), CARDS["rtx-3090"], WANTED)
    fewer, _ = bits_that_fit(model(), CARDS["v100-16"], Wanted(context=8192, kv_type=KVType.K8V4))
    assert 2.2 <= fewer < bits < 8
    assert setting.free_nbytes >= 0


def converted(source: Path, *options: str) -> str:
    """What is said before it is found that there is no card to convert on."""
    (source / "tokenizer.json").write_text("{}")
    arguments = ["models", "convert", str(source), "--name", "none", *options]
    result = CliRunner().invoke(main, arguments, env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.exit_code == 1, result.output
    return result.output


def test_a_head_of_more_bits_leaves_fewer_for_the_layers(tmp_path: Path) -> None:
    source = write(tmp_path / "m", plain)
    said = [converted(source, "--card", "rtx-3090", "--head-bits", bits) for bits in ("2", "8")]
    small, large = (float(text.split(" bits fit ")[0].split()[-1]) for text in said)
    assert large < small


def test_a_reserve_that_has_to_be_smaller_is_said(tmp_path: Path) -> None:
    source = write(tmp_path / "m", plain)
    assert f"PREREAD_GPU_RESERVE_BYTES={SMALL_RESERVE}" in converted(source, "--card", "v100-16", "--context", "8192")
    assert "PREREAD_GPU_RESERVE_BYTES" not in converted(source, "--card", "rtx-3090", "--context", "8192")


def test_where_nothing_can_be_chosen_it_is_said_why() -> None:
    with pytest.raises(Invalid, match=r"Nothing of .* fits|Only .* bits a weight fit"):
        bits_that_fit(model(params_b=180.0), CARDS["t4"], WANTED)
    with pytest.raises(Invalid, match="need a card"):
        bits_that_fit(model(), this_processor(10.0), WANTED)


def test_quantized_weights_are_not_converted_again(tmp_path: Path) -> None:
    from benchmarks.gpu_model import Recipe, make
    from service.planning.headers import read_model

    make(Recipe(layers=2, hidden=512, intermediate=1408, heads=8, kv_heads=2, head_dim=64, vocab=512), tmp_path / "m")
    facts = read_model(tmp_path / "m")
    plan, _ = make_plan(facts, CARDS["rtx-3090"], Wanted(context=1024, kv_type=KVType.FP16))
    assert conversion_for(facts, plan.settings) is None
