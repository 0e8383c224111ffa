"""The synthetic model is what exllamav2 0.3.2 reads: `ext.make_q_matrix` and its C++ side check these shapes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from benchmarks import gpu_model
from cache_store.layout import KVType
from service.engine.exl2_engine.footprint import weights_footprint
from service.engine.models.card import check_kv_type, load_card
from service.engine.models.rope import rope_digest
from service.engine.models.weights import tensor_spans
from service.engine.tokenizer import Tokenizer

SIZES = {"layers": 2, "hidden": 256, "intermediate": 384, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 512}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    recipe = gpu_model.Recipe(**SIZES, context=4096)
    gpu_model.write_weights(recipe, directory, shard_nbytes=200_000)
    gpu_model.write_card(recipe, directory, "tiny")
    return directory


@pytest.fixture(scope="module")
def stored(tiny: Path) -> dict[str, torch.Tensor]:
    files = sorted(tiny.glob("*.safetensors"))
    assert len(files) > 1
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("name", "n_in", "n_out", "bits"),
    [
        ("model.layers.0.self_attn.q_proj", 256, 256, 4),
        ("model.layers.1.self_attn.k_proj", 256, 128, 4),
        ("model.layers.1.mlp.down_proj", 384, 256, 4),
        ("lm_head", 256, 512, 6),
    ],
)
def test_a_linear_has_the_tensors_that_make_q_matrix_asks_for(
    stored: dict[str, torch.Tensor], name: str, n_in: int, n_out: int, bits: int
) -> None:
    parts = {k.removeprefix(f"{name}."): t for k, t in stored.items() if k.startswith(f"{name}.")}
    kinds = {"q_weight": torch.int32, "q_scale": torch.int32, "q_scale_max": torch.float16}
    kinds |= {"q_groups": torch.int16, "q_invperm": torch.int32}
    assert {k: t.dtype for k, t in parts.items()} == kinds
    groups = n_in // 128
    assert parts["q_weight"].shape == (n_in * bits // 32, n_out)
    assert parts["q_scale"].shape == (groups, n_out // 8)
    assert parts["q_scale_max"].shape == (groups,)
    assert parts["q_invperm"].tolist() == list(range(n_in))
    assert _rows_of_groups(parts["q_groups"].tolist(), len(parts["q_weight"])) == [128] * groups
    assert (parts["q_scale"] == 0x77777777).all()


def _rows_of_groups(q_groups: list[int], n_q_rows: int) -> list[int]:
    """Inputs of each group, as exllamav2's `make_group_map` counts them."""
    bits, starts = q_groups[::2], q_groups[1::2]
    ends = [*starts[1:], n_q_rows]
    return [(end - start) * 32 // b for b, start, end in zip(bits, starts, ends, strict=True)]


def test_weights_are_as_wide_as_those_of_a_trained_model(stored: dict[str, torch.Tensor]) -> None:
    words = stored["model.layers.0.mlp.up_proj.q_weight"]
    codes = torch.stack([(words >> shift) & 15 for shift in range(0, 32, 4)]).float() - 8
    scale = stored["model.layers.0.mlp.up_proj.q_scale_max"][0] / 256 * 64
    assert float((codes * scale).std()) == pytest.approx(0.02, rel=0.05)
    assert float(stored["model.embed_tokens.weight"].float().std()) == pytest.approx(0.02, rel=0.05)


def test_no_two_tensors_are_the_same(stored: dict[str, torch.Tensor]) -> None:
    first, second = (stored[f"model.layers.{i}.mlp.up_proj.q_weight"] for i in range(2))
    assert not torch.equal(first, second)


def test_it_is_a_finished_model(tiny: Path) -> None:
    card = load_card(tiny)
    for kv_type in KVType:
        check_kv_type(card, kv_type)
    config = AutoConfig.from_pretrained(str(tiny), local_files_only=True)
    assert card.digests.rope == rope_digest(config)
    assert config.architectures == ["LlamaForCausalLM"]
    assert card.quantization == "exl2-4.0bpw"
    assert card.layout(KVType.K8V4).n_layers == 2


def test_one_letter_is_one_token_and_every_token_has_a_text(tiny: Path) -> None:
    tokenizer = Tokenizer.load(tiny)
    assert tokenizer.understood
    assert len(tokenizer.encode_plain("a w300 b" * 10)) == 80
    assert tokenizer.decode(tokenizer.encode_plain("naïve w300")) == "naïve w300"
    assert all(tokenizer.token_bytes(i) for i in range(512))


def test_the_plan_counts_its_bytes(tiny: Path) -> None:
    found = weights_footprint(tensor_spans(tiny), share_head=True)
    assert found.largest_matrix == 256 * 384
    assert sum(found.embedding) == 512 * 256 * 2


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="more rows than EXL2 can number"):
        gpu_model.exl2_linear(gpu_model.Noise(0, 1 << 10), 1 << 19, 8, 4)


def test_a_directory_in_use_is_left_alone(tiny: Path) -> None:
    with pytest.raises(SystemExit, match="not empty"):
        gpu_model.make(gpu_model.Recipe(**SIZES), tiny)
