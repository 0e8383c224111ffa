from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Raw
from tokenizers.processors import TemplateProcessing

from service.engine.models.convert.calibration import beginning, make_calibration
from service.engine.models.convert.request import Rows
from service.engine.models.convert.texts import bundled_texts, held_out_texts
from service.engine.models.convert.work import CALIBRATION_NAME
from service.engine.models.errors import SourceRefused
from service.engine.tokenizer import Tokenizer


def test_the_mix_has_many_languages_numbers_and_code_and_none_of_the_held_out_texts() -> None:
    texts = list(bundled_texts())
    together = "\n".join(texts)
    for sign in ("harbour", "Gemeinderat", "coopérative", "图书馆", "заповедник".capitalize(), "الميناء", "गाँव",
                 "INVOICE No.", "def ", "const "):  # fmt: skip
        assert sign in together, sign
    assert len(together) > 150_000
    for text in held_out_texts():
        assert text[:200] not in together
        assert text[-200:] not in together
    assert list(bundled_texts()) == texts


def test_kinds_of_texts_take_turns() -> None:
    first = "".join(text for text, _ in zip(bundled_texts(), range(20), strict=False))
    assert all(sign in first for sign in ("harbour", "图书馆", "INVOICE", "import "))


def test_rows_are_of_the_users_texts_first(source: Path) -> None:
    mine = "A word of mine. " * 20
    made = make_calibration(source, [mine], Rows(6, 64, 3), 512)
    ids = Tokenizer.load(source).encode_plain(mine)
    n = len(ids) // 64
    assert 0 < n < 6
    assert made.ids[:n].flatten().tolist() == ids[: 64 * n]
    assert made.ids.shape == (6, 64)
    assert made.label == "1 document and the bundled mix"
    other = make_calibration(source, [], Rows(6, 64, 3), 512)
    assert other.label == "the bundled mix"
    assert other.digest != made.digest
    assert make_calibration(source, [mine], Rows(6, 64, 3), 512).digest == made.digest


def test_no_row_comes_twice_and_measured_ones_are_spread(source: Path, tmp_path: Path) -> None:
    made = make_calibration(source, [], Rows(100_000, 256, 5), 512)
    assert len(made.ids) == made.rows.rows < 100_000
    assert len(set(map(tuple, made.ids.tolist()))) == len(made.ids)
    assert torch.equal(made.measured, made.ids[[i * len(made.ids) // 5 for i in range(5)]])
    made.save(tmp_path)
    assert torch.equal(load_file(tmp_path / CALIBRATION_NAME)["rows"], made.ids)


def test_rows_fit_the_model_and_too_little_text_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_calibration(source, [], Rows(2, 2048, 1), 512)
    assert made.ids.shape == (2, 512)
    assert max(map(len, made.held_out)) == 512
    monkeypatch.setattr("service.engine.models.convert.calibration.bundled_texts", list)
    with pytest.raises(SourceRefused, match="not even one row of 64 tokens"):
        make_calibration(source, ["short"], Rows(2, 64, 1), 512)


def test_every_row_begins_as_what_is_served(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """With the token that the tokenizer puts before a text, and never with one that a text spells out."""
    directory = make_model(tmp_path / "own")
    raw = Raw.from_file(str(directory / "tokenizer.json"))
    token, number = "<|im_start|>", raw.token_to_id("<|im_start|>")
    raw.post_processor = TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])
    raw.save(str(directory / "tokenizer.json"))
    assert beginning(directory) == [number]
    made = make_calibration(directory, ["<|im_start|> is spelled out here. " * 40], Rows(3, 64, 1), 512)
    assert (made.ids[:, 0] == number).all()
    assert not (made.ids[:, 1:] == number).any()
    assert all(ids[0] == number for ids in made.held_out)
