"""Bounds of the llamacpp engine: of weights as the GGUF has them, where llama.cpp computes."""

from pathlib import Path
from typing import Any

import pytest

from service.bench import physics
from service.bench.physics import physics_of
from service.planning.placing import computes_on_card
from service.settings import Settings
from tests.service.engine.models.test_gguf import HIDDEN, write_model


def settings(tmp_path: Path, **changes: Any) -> Settings:
    return Settings(data_dir=tmp_path, engine="llamacpp", kv_type="k8v8", **changes)


def test_a_step_reads_the_weights_and_rows_as_they_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(physics, "gpu_backends", list)
    tensors = write_model(tmp_path / "tiny.gguf")
    found = physics_of(settings(tmp_path), tmp_path / "tiny.gguf", bandwidth_gbps=20.0)
    assert found is not None
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert found.step_nbytes == stored - tensors["token_embd.weight"].nbytes  # of which a step needs some rows only
    assert found.row_nbytes == found.stored_row_nbytes == 2 * 2 * HIDDEN * 34 // 32


@pytest.mark.parametrize(
    ("backends", "offload", "on_card"),
    [(["cuda"], "auto", True), (["cuda"], "all", True), (["cuda"], "none", False), ([], "auto", False),
     (None, "auto", False)],
)  # fmt: skip
def test_it_is_on_a_card_where_llama_cpp_was_compiled_for_one(
    tmp_path: Path, backends: list[str] | None, offload: str, on_card: bool
) -> None:
    assert computes_on_card(settings(tmp_path, offload=offload), backends) == on_card
    assert computes_on_card(Settings(data_dir=tmp_path, engine="exl2"), backends)
    assert not computes_on_card(Settings(data_dir=tmp_path, engine="torch"), backends)
