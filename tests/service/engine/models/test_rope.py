"""Keys are stored after RoPE, so two engines share a snapshot only when their frequencies are the same bits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_store.layout import KVType
from service.engine.models.importer import import_model
from service.engine.models.rope import inv_freq, stored_inv_freq, stored_rope_digest
from service.engine.torch_engine.loading import load_model
from service.engine.torch_engine.runner import TorchRunner

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn with its betas": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0,
    },
    "yarn with its own factor": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "attention_factor": 1.25,
    },
    "llama3": LLAMA3 | {"original_max_position_embeddings": 128},
}  # fmt: skip


@pytest.fixture(params=ROPES, scope="module")
def imported(
    request: pytest.FixtureRequest, make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    rope = {"rope_theta": 1e4} | ROPES[request.param]
    root = tmp_path_factory.mktemp("rope")
    source = make_model(root / "source", rope_parameters=rope)
    import_model(source, name="m", models_dir=root / "models", measure=lambda *_: {})
    return root / "models" / "m"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frequencies_are_bit_for_bit_those_of_the_torch_engine(imported: Path, dtype: str) -> None:
    rotary = load_model(imported, dtype, "cpu").model.model.rotary_emb
    frequencies, scaling = stored_inv_freq(imported)
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, rotary.inv_freq.float())
    assert rotary.inv_freq.dtype == torch.float32
    assert scaling == rotary.attention_scaling


def test_each_scaling_gives_frequencies_of_its_own(make_model: Callable[..., Path], tmp_path: Path) -> None:
    found = []
    for i, rope in enumerate(ROPES.values()):
        frequencies, scaling = stored_inv_freq(
            make_model(tmp_path / str(i), rope_parameters={"rope_theta": 1e4} | rope)
        )
        found.append((tuple(frequencies.tolist()), scaling))
    assert len(set(found)) == len(ROPES)


def test_the_allowed_length_changes_no_frequency(imported: Path, tmp_path: Path) -> None:
    config = json.loads((imported / "config.json").read_bytes())
    before, digest = stored_inv_freq(imported), stored_rope_digest(imported)
    for length in (64, 100_000):
        (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": length}))
        frequencies, scaling = stored_inv_freq(tmp_path)
        assert torch.equal(frequencies, before[0])
        assert (scaling, stored_rope_digest(tmp_path)) == (before[1], digest)


def test_what_is_served_does_not_follow_the_length_of_a_text(imported: Path) -> None:
    rotary = load_model(imported, "float32", "cpu").model.model.rotary_emb
    before = rotary.inv_freq.clone()
    rotary(torch.zeros(1, 1, 1), torch.tensor([[100_000]]))
    assert torch.equal(rotary.inv_freq, before)


def test_the_identity_of_a_model_holds_the_frequencies(imported: Path) -> None:
    runner = TorchRunner.load(imported, kv_type=KVType.FP16, compute_dtype="float32", n_slots=1, tail_tokens=16)
    assert runner.fingerprint.rope == stored_rope_digest(imported)


def test_frequencies_need_no_weights() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen3", hidden_size=1 << 14, num_hidden_layers=200, head_dim=128)
    frequencies, scaling = inv_freq(config)
    assert frequencies.shape == (64,)
    assert scaling == 1.0
