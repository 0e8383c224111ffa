"""`preread models convert`, `show` and `list` on the command line, without a card."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from service.cli import main
from service.engine.models.convert.convert import Wanted, convert_model
from service.engine.models.convert.request import Rows
from tests.service.engine.models.convert.conftest import PretendedConverter


@pytest.fixture
def preread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return lambda *words: CliRunner().invoke(main, ["models", *words])


def test_without_a_card_it_says_what_to_do(preread: Callable[..., Result], source: Path, tmp_path: Path) -> None:
    result = preread("convert", str(source), "--bits", "4")
    assert result.exit_code == 1
    assert "convert on a machine that has one" in result.stderr
    result = preread("convert", str(source), "--card", "cpu")
    assert result.exit_code == 1
    assert "name it with --card, or give --bits" in result.stderr
    result = preread("convert", str(source), "--card", "h200", "--context", "400")
    assert result.exit_code == 1
    assert "plain weights of tiny llama fit" in " ".join(result.stderr.split())
    result = preread("convert", "nothing", "--bits", "4")
    assert result.exit_code == 1
    assert "there is no model nothing" in result.stderr
    assert preread("convert", str(source), "--bits", "many").exit_code == 2
    assert not (tmp_path / "convert").exists()


def test_show_and_list_tell_how_like_its_source_a_model_is(
    preread: Callable[..., Result], source: Path, tmp_path: Path, converter: PretendedConverter
) -> None:
    convert_model(
        source, Wanted(4.25, rows=Rows(4, 64, 2)), name="small", models_dir=tmp_path / "models",
        work_dir=tmp_path / "work", tools=converter.tools(),
    )  # fmt: skip
    row = json.loads(preread("show", "small", "--json").stdout)
    made = row["conversion"]
    assert made["bits"] == 4.25
    shown = preread("show", "small").stdout
    assert "exl2-4.25bpw" in shown
    assert made["calibration"] in shown
    assert f"mean KL {made['likeness']['mean_kl']:.4f}" in shown
    listed = preread("list").stdout
    assert f"KL {made['likeness']['mean_kl']:.4f}" in listed
    assert made["calibration"][:8] in listed
    assert json.loads(preread("list", "--json").stdout)["models"][0]["conversion"] == made
