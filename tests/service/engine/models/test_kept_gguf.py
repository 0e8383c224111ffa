"""A GGUF kept as it is for llama.cpp, and one that an adapter was merged into."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from service.engine.models.card import ModelCard, check_engine, load_card
from service.engine.models.errors import AdapterRefused, EngineRefused, ModelDamaged, SourceRefused
from service.engine.models.gguf import read_gguf
from service.engine.models.importer import import_model, verify_model
from service.engine.models.lora import merge_adapter
from service.engine.models.source import silent
from service.engine.models.weights import GGUF_NAME
from tests.service.engine.models.test_gguf import write_model

Q, K, DOWN = (f"model.layers.{n}" for n in ("0.self_attn.q_proj", "1.self_attn.k_proj", "1.mlp.down_proj"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_model(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def kept(file: Path, tmp_path: Path, **options) -> ModelCard:
    return import_model(
        file, name="kept", models_dir=tmp_path / "models", engine="llamacpp", measure=lambda *_: {}, **options
    )


@pytest.fixture
def adapter(make_adapter: Callable[..., Path]) -> Path:
    draw = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor | None] = {}
    for module in (Q, K, DOWN):
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, 64, generator=draw)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(64, 4, generator=draw)
    return make_adapter(tensors=tensors)


def test_the_file_is_linked_and_served_by_llama_cpp_alone(file: Path, tmp_path: Path) -> None:
    card = kept(file, tmp_path)
    directory = tmp_path / "models" / "kept"
    assert os.path.samefile(file, directory / GGUF_NAME)
    assert (card.engine, card.needs_card, card.n_layers, card.head_dim) == ("llamacpp", False, 2, 32)
    assert card == load_card(directory) == verify_model(directory)
    check_engine(card, "llamacpp")
    for engine in ("torch", "exl2"):
        with pytest.raises(EngineRefused, match="PREREAD_ENGINE=llamacpp"):
            check_engine(card, engine)


def test_another_byte_in_the_file_is_seen(file: Path, tmp_path: Path) -> None:
    kept(file, tmp_path)
    with file.open("r+b") as opened:  # the same file, by its other name
        opened.seek(-3, os.SEEK_END)
        opened.write(b"\x55")
    with pytest.raises(ModelDamaged, match="weights differ"):
        verify_model(tmp_path / "models" / "kept")


@pytest.mark.parametrize("alignment", [0, 256])
def test_a_merged_adapter_is_the_one_that_transformers_would_have(
    adapter: Path, tmp_path: Path, alignment: int
) -> None:
    file = tmp_path / "aligned.gguf"
    write_model(file, alignment)
    expected = read_gguf(file, silent).tensors
    base = {name: tensor.clone() for name, tensor in expected.items()}
    merge_adapter(expected, adapter, silent)
    card = kept(file, tmp_path, adapter=adapter)
    found = read_gguf(tmp_path / "models" / "kept" / GGUF_NAME, silent).tensors
    assert card.quantization == "gguf-MOSTLY_Q8_0"
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        changed = name.removesuffix(".weight") in (Q, K, DOWN)
        assert (found[name] - tensor).abs().max() <= (0.15 if changed else 0), name
        assert not changed or (found[name] - base[name]).abs().max() > 5
    assert verify_model(tmp_path / "models" / "kept") == card


def test_what_is_no_gguf_or_only_a_part_of_one_is_refused(file: Path, tmp_path: Path, adapter: Path) -> None:
    part = file.rename(tmp_path / "tiny-00001-of-00002.gguf")
    with pytest.raises(SourceRefused, match="--merge"):
        kept(part, tmp_path)
    with pytest.raises(SourceRefused, match="not a GGUF"):
        kept(adapter, tmp_path)
    whole = part.rename(tmp_path / "whole.gguf")
    with pytest.raises(SourceRefused, match="--dtype"):
        kept(whole, tmp_path, dtype="float16")
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterRefused):
        kept(whole, tmp_path, adapter=adapter)
    assert not (tmp_path / "models" / "kept").exists()
