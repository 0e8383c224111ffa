"""A damaged GGUF ends in one sentence everywhere, and a plan refuses what an import refuses."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from service.cli import main
from service.planning.headers import read_model
from tests.service.engine.models.damaged_gguf import (
    BYTES,
    FEATURES,
    ONLY_LLAMA_CPP,
    WRONG,
    damaged,
    with_tensors,
)
from tests.service.engine.models.test_gguf import write_model

SECONDS = 5.0
"""Of each command; the counts of these files would keep a reader that believes them busy for days."""


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path / "data"))


def told(*arguments: str) -> dict[str, Any]:
    """The JSON of a command that ends with exit code 1."""
    began = time.perf_counter()
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    assert time.perf_counter() - began < SECONDS
    return json.loads(result.stdout)


def commands(file: Path) -> Iterator[tuple[str, ...]]:
    yield "plan", str(file), "--card", "rtx-3090", "--context", "64"
    yield "models", "import", str(file), "--name", "m"
    yield "models", "import", str(file), "--name", "m", "--engine", "llamacpp"


def sentences(file: Path) -> list[str]:
    """Of a plan, an import, and an import for llama.cpp."""
    found = [told(*command) for command in commands(file)]
    return ["; ".join(one["problems"]) if "problems" in one else one["error"]["message"] for one in found]


@pytest.mark.parametrize("damage", BYTES)
def test_bytes_that_cannot_be_are_told_in_a_sentence(tmp_path: Path, damage: str) -> None:
    content, said = BYTES[damage]
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    for sentence in sentences(file):
        assert said in sentence
        assert str(file) in sentence


@pytest.mark.parametrize("damage", WRONG)
def test_a_value_that_cannot_be_is_told_in_a_sentence(tmp_path: Path, damage: str) -> None:
    key, value = WRONG[damage]
    of_plan, *of_imports = sentences(damaged(tmp_path / "m.gguf", key, value))
    assert all(sentence in (of_plan, f"m.gguf is not imported: {of_plan}") for sentence in of_imports)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_plan_refuses_what_an_import_refuses(tmp_path: Path, feature: str) -> None:
    key, value, said = FEATURES[feature]
    file = damaged(tmp_path / "m.gguf", key, value)
    of_plan, *of_imports = sentences(file)
    assert said in of_plan
    assert said in told(*next(commands(file)), "--engine", "llamacpp")["problems"][0]
    assert all(said in sentence for sentence in of_imports)


@pytest.mark.parametrize("feature", ONLY_LLAMA_CPP)
def test_a_plan_refuses_what_transformers_would_leave_out(tmp_path: Path, feature: str) -> None:
    key, value, said = ONLY_LLAMA_CPP[feature]
    plan, plain, kept = commands(damaged(tmp_path / "m.gguf", key, value))
    assert said in told(*plan)["problems"][0]
    assert said in told(*plain)["error"]["message"]
    for command in (kept, (*plan, "--engine", "llamacpp")):
        result = CliRunner().invoke(main, [*command, "--json"])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("arch", ["gemma2", "qwen2moe", "granite", "lfm2", "none"])
def test_another_architecture_is_refused_by_its_name(tmp_path: Path, arch: str) -> None:
    file = tmp_path / "m.gguf"
    write_model(file, arch=arch)
    assert all(f"architecture '{arch}' are not served" in sentence for sentence in sentences(file))


def test_a_file_that_is_cut_off_says_what_it_lacks(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_model(file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    assert all("cut off: 1,000 bytes of its tensors are missing" in sentence for sentence in sentences(file))
    for nbytes in range(4, 9000, 997):
        file.write_bytes(whole[:nbytes])
        assert all("cut off" in sentence or "than" in sentence for sentence in sentences(file))


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("blk.1.ffn_up.weight", None, "1 of its tensors are missing, the first is blk.1.ffn_up.weight"),
        ("blk.1.ffn_up.weight", (64, 32), "of shape"),
        ("token_embd.weight", None, "no table of embeddings"),
        ("token_embd.weight", (259, 32), "32 wide"),
        ("blk.0.attn_q.bias", (64,), "blk.0.attn_q.bias would be left out"),
        ("rope_freqs.weight", (16,), "RoPE has factors"),
        ("rope_factors_long.weight", (16,), "RoPE changes with the length"),
    ],
)
def test_tensors_that_are_not_those_of_the_model(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, said: str
) -> None:
    file = with_tensors(
        tmp_path / "m.gguf",
        lambda tensors: tensors.pop(name) if shape is None else tensors.update({name: np.full(shape, 2, np.float32)}),
    )
    plan, plain, _ = commands(file)
    assert all(said in json.dumps(told(*command)) for command in (plan, plain))


def test_factors_of_rope_that_change_nothing_are_no_reason(tmp_path: Path) -> None:
    ones = {"rope_freqs.weight": np.ones(16, np.float32)}
    assert read_model(with_tensors(tmp_path / "m.gguf", lambda tensors: tensors.update(ones))).problems == ()


@pytest.mark.parametrize("damage", ["2^41 numbers", "a tensor behind the file"])
def test_the_doctor_tells_a_damaged_gguf(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(BYTES[damage][0])
    checks = [option for name in ("model", "cache-size", "gptq") for option in ("--check", name)]
    found = told("doctor", "--model", str(file), *checks)
    assert any(BYTES[damage][1] in finding["evidence"] for finding in found["findings"])
