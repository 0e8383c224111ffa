from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from service.engine.models.errors import AdapterRefused
from service.engine.models.lora import merge_adapter
from service.engine.models.source import silent

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        f"{Q}.weight": torch.randn(128, 64).to(dtype),
        f"{DOWN}.weight": torch.randn(64, 96).to(dtype),
        "model.norm.weight": torch.ones(64),
    }


@pytest.mark.parametrize(("settings", "scale"), [({}, 2.0), ({"use_rslora": True}, 4.0)])
def test_the_merged_layer_is_the_layer_plus_its_adapter(
    make_adapter: Callable[..., Path], settings: dict, scale: float
) -> None:
    directory = make_adapter(settings)
    stored = load_file(directory / "adapter_model.safetensors")
    base, merged = weights(), weights()
    assert merge_adapter(merged, directory, silent) == 2
    x = torch.randn(5, 64)
    a, b = (stored[f"base_model.model.{Q}.lora_{side}.weight"] for side in "AB")
    by_hand = x @ base[f"{Q}.weight"].T + scale * ((x @ a.T) @ b.T)
    torch.testing.assert_close(x @ merged[f"{Q}.weight"].T, by_hand, rtol=1e-4, atol=1e-4)
    assert torch.equal(merged["model.norm.weight"], base["model.norm.weight"])


def test_a_merge_in_half_precision_rounds_once(make_adapter: Callable[..., Path]) -> None:
    directory = make_adapter()
    exact, half = {k: v.bfloat16().float() for k, v in weights().items()}, weights(torch.bfloat16)
    merge_adapter(exact, directory, silent)
    merge_adapter(half, directory, silent)
    assert torch.equal(half[f"{Q}.weight"], exact[f"{Q}.weight"].bfloat16())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"bias": "lora_only"}, "bias=lora_only"),
        ({"peft_type": "IA3"}, "type IA3"),
        ({"r": 0}, "rank 0"),
        ({"r": "many"}, "no readable adapter_config"),
        ({"r": 8}, "rank 8 and a weight"),
    ],
)
def test_what_is_not_merged_is_refused_by_name(make_adapter: Callable[..., Path], settings: dict, message: str) -> None:
    merged = weights()
    with pytest.raises(AdapterRefused, match=message):
        merge_adapter(merged, make_adapter(settings), silent)
    assert all(torch.equal(merged[k], v) for k, v in weights().items())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"base_model.model.{Q}.lora_B.weight": None}, "a pair of matrices"),
        ({f"base_model.model.{DOWN}.lora_A.weight": torch.zeros(4, 95)}, "need others"),
        ({f"base_model.model.{DOWN}.lora_B.weight": torch.zeros(63, 4)}, "need others"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 4)}, "not a LoRA matrix"),
        ({f"base_model.model.{Q}.lora_magnitude_vector": torch.zeros(4)}, "not a LoRA matrix"),
        (
            {f"base_model.model.model.layers.9.x.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"},
            "which the model does not have",
        ),
    ],
)
def test_matrices_that_do_not_fit_are_refused(make_adapter: Callable[..., Path], tensors: dict, message: str) -> None:
    merged = weights()
    with pytest.raises(AdapterRefused, match=message):
        merge_adapter(merged, make_adapter(tensors=tensors), silent)
    assert all(torch.equal(merged[k], v) for k, v in weights().items())


def test_unreadable_adapters(make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match=r"no readable adapter_config\.json"):
        merge_adapter(weights(), tmp_path / "absent", silent)
    directory = make_adapter()
    (directory / "adapter_model.safetensors").write_bytes(b"junk")
    with pytest.raises(AdapterRefused, match="cannot be read"):
        merge_adapter(weights(), directory, silent)
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(AdapterRefused, match="pickled adapters are not read"):
        merge_adapter(weights(), directory, silent)
