"""The GPTQ copy read as exllamav2 reads it (`reconstruct_gptq_kernel`) has the weights of the plain copy."""

import pytest
import torch

from benchmarks import gpu_gptq


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
