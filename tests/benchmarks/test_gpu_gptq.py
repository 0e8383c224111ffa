"""The GPTQ copy read as exllamav2 reads it (`reconstruct_gptq_kernel`) has the weights of the plain copy."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import gpu_gptq
from benchmarks.gpu_models import tiny_model
from service.engine.models.card import load_card
from service.engine.models.importer import verify_model


def nibbles(packed: torch.Tensor, dim: int) -> torch.Tensor:
    parts = torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)], dim + 1)
    return parts.flatten(dim, dim + 1)


@pytest.mark.parametrize("act_order", [False, True])
def test_the_stored_numbers_are_the_plain_weights(act_order: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 192, generator=generator) * 0.05
    order = torch.randperm(192, generator=generator) if act_order else None
    made = gpu_gptq.quantize(weight, 64, order)
    group = made.tensors["g_idx"].long()
    codes, zeros = nibbles(made.tensors["qweight"], 0), nibbles(made.tensors["qzeros"], 1)
    assert made.tensors["qweight"].shape == (192 // 8, 48)
    assert made.tensors["qzeros"].shape == (3, 48 // 8)
    value = (codes - (zeros[group] + 1)) * made.tensors["scales"].float()[group]
    assert torch.equal(value.T, made.weight)
    assert float((made.weight - weight).abs().max()) < 0.02
    assert group.bincount().tolist() == [64, 64, 64]
    assert bool((group.diff() >= 0).all()) is not act_order


def test_a_group_divides_the_inputs() -> None:
    assert [gpu_gptq.group_size_for(n, 128) for n in (1536, 576, 96)] == [128, 64, 32]
    with pytest.raises(ValueError, match="groups of 32"):
        gpu_gptq.group_size_for(48, 128)


def test_both_copies_are_finished_models_of_equal_value(tmp_path: Path) -> None:
    source = tiny_model(tmp_path)
    gptq, plain = gpu_gptq.make(source, tmp_path / "copies", 64, True)
    card, other = verify_model(gptq), verify_model(plain)
    assert card.quantization == "gptq-4bit-64g-actorder"
    assert other.quantization == "none"
    assert card.kv_types == other.kv_types == load_card(source).kv_types
    assert card.prompt == load_card(source).prompt
    assert card.n_parameters == other.n_parameters == load_card(source).n_parameters
    stored, written = load_file(gptq / "model.safetensors"), load_file(plain / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    group = stored[f"{name}.g_idx"].long()
    zeros = nibbles(stored[f"{name}.qzeros"], 1)[group] + 1
    value = (nibbles(stored[f"{name}.qweight"], 0) - zeros) * stored[f"{name}.scales"].float()[group]
    assert torch.equal(value.T, written[f"{name}.weight"])
    assert group.bincount().tolist() == [32, 32, 32]  # 96 inputs are no multiple of 64
    norm = "model.layers.1.input_layernorm.weight"
    assert torch.equal(stored[norm].float(), written[norm])
