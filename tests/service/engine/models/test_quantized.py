"""Models with EXL2 and GPTQ weights are kept as they are, and only where exllamav2 reads them rightly."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from cache_store.layout import KVType
from service.cli import main
from service.engine.factory import EngineConfig, open_host
from service.engine.models import gates
from service.engine.models.card import KVGate, check_engine, check_kv_type, load_card
from service.engine.models.errors import (
    ArchitectureRefused,
    EngineRefused,
    KVTypeRefused,
    ModelDamaged,
    SourceRefused,
)
from service.engine.models.importer import import_model, measure_model, verify_model
from service.engine.models.quantized import Quantization, find_quantization, weight_files
from service.engine.torch_engine.loading import load_model
from service.planning.headers import read_model
from tests.service.engine.models.packed import exl2_parts

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
EXL2 = {"quant_method": "exl2", "bits": 4.0, "head_bits": 6}
Edit = Callable[[dict[str, torch.Tensor]], None]


def gptq_parts(n_out: int, n_in: int) -> dict[str, torch.Tensor]:
    groups = n_in // 32
    return {
        "qweight": torch.zeros(n_in // 8, n_out, dtype=torch.int32),
        "qzeros": torch.zeros(groups, n_out // 8, dtype=torch.int32),
        "scales": torch.ones(groups, n_out, dtype=torch.float16),
        "g_idx": torch.arange(n_in, dtype=torch.int32) // 32,
    }


@pytest.fixture
def make_quantized(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny Llama with its linears quantized; `edit` changes the tensors before they are written."""

    def make(settings: dict[str, Any] | None = None, edit: Edit = lambda tensors: None, **changes: Any) -> Path:
        settings = settings or EXL2
        directory = make_model(tmp_path / "sources" / settings["quant_method"], **changes)
        parts = exl2_parts if settings["quant_method"] == "exl2" else gptq_parts
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(directory / "model.safetensors").items():
            if "_proj" not in name:
                tensors[name] = tensor.half()
                continue
            n_out, n_in = tensor.shape
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{part}": t for part, t in parts(n_out, n_in).items()}
        edit(tensors)
        save_file(tensors, directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_bytes())
        (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        return directory

    return make


def imported(source: Path, models_dir: Path, name: str = "q", **arguments: Any) -> Any:
    return import_model(source, name=name, models_dir=models_dir, **arguments)


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        (EXL2, "exl2-4.0bpw"),
        (EXL2 | {"bits": 3.5}, "exl2-3.5bpw"),
        (EXL2 | {"bits": 4.25}, "exl2-4.25bpw"),
        (GPTQ, "gptq-4bit-32g"),
        (GPTQ | {"desc_act": True}, "gptq-4bit-32g-actorder"),
        (GPTQ | {"group_size": -1}, "gptq-4bit"),
    ],
)
def test_quantized_weights_are_kept_and_named(
    make_quantized: Callable[..., Path], tmp_path: Path, settings: dict[str, Any], label: str
) -> None:
    source = make_quantized(settings)
    card = imported(source, tmp_path / "models")
    kept = tmp_path / "models" / "q"
    assert card.quantization == label
    assert card.needs_card
    assert card == load_card(kept) == verify_model(kept)
    assert os.path.samefile(kept / "model.safetensors", source / "model.safetensors")
    assert (kept / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert (card.n_layers, card.head_dim, card.dtype, card.eos_token_ids) == (2, 32, "float16", [2])
    assert card.n_parameters == sum(t.numel() for t in load_plain(make_quantized, tmp_path).values())
    assert card.prompt.question_suffix.endswith("assistant\n")


def load_plain(make_quantized: Callable[..., Path], tmp_path: Path) -> dict[str, torch.Tensor]:
    """The tensors of the same model before it was quantized."""
    shapes: dict[str, torch.Tensor] = {}
    make_quantized(EXL2, edit=lambda tensors: shapes.update(tensors))
    plain = {name: t for name, t in shapes.items() if "_proj" not in name}
    for name, t in shapes.items():
        if name.endswith("q_weight"):
            plain[name] = torch.empty(t.shape[0] * 8, t.shape[1])
    return plain


def test_where_links_do_not_reach_the_weights_are_copied(
    make_quantized: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_quantized()

    def refuse(*_: Any) -> None:
        raise OSError("another disk")

    monkeypatch.setattr(os, "link", refuse)
    imported(source, tmp_path / "models")
    kept = tmp_path / "models" / "q" / "model.safetensors"
    assert kept.read_bytes() == (source / "model.safetensors").read_bytes()
    assert not os.path.samefile(kept, source / "model.safetensors")


def test_only_the_files_of_the_index_belong_to_a_model(make_quantized: Callable[..., Path], tmp_path: Path) -> None:
    source = make_quantized()
    names = load_file(source / "model.safetensors")
    (source / "model.safetensors").rename(source / "part-1.safetensors")
    save_file({"other": torch.zeros(1)}, source / "consolidated.safetensors")
    index = {"weight_map": dict.fromkeys(names, "part-1.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "consolidated.safetensors" not in imported(source, tmp_path / "models").files


def test_the_index_that_a_converter_copied_from_its_source_is_passed_over(
    make_quantized: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_quantized()
    (source / "model.safetensors").rename(source / "output.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in weight_files(source)] == ["output.safetensors"]
    assert read_model(source).kind == "exl2"
    import_model(source, name="tiny", models_dir=tmp_path / "models")
    (source / "output.safetensors").rename(source / "model.safetensors")
    with pytest.raises(SourceRefused, match=r"model-00001-of-00002\.safetensors, which is not there"):
        weight_files(source)


def test_the_settings_of_an_older_gptq_model_move_into_its_config(
    make_quantized: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_quantized(GPTQ)
    config = json.loads((source / "config.json").read_bytes())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    old = {"bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"}
    (source / "quantize_config.json").write_text(json.dumps(old))
    card = imported(source, tmp_path / "models")
    assert card.quantization == "gptq-4bit-32g-actorder"
    stored = json.loads((tmp_path / "models" / "q" / "config.json").read_bytes())
    assert stored["quantization_config"] == old | {"quant_method": "gptq"}


def test_tensors_that_are_no_weights_do_not_count(make_quantized: Callable[..., Path], tmp_path: Path) -> None:
    """Older models store the frequencies of RoPE in every layer."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)

    assert imported(make_quantized(GPTQ, add), tmp_path / "models").quantization == "gptq-4bit-32g"


def drop(suffix: str) -> Edit:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(suffix)]:
            del tensors[name]

    return edit


def unquantize(module: str) -> Edit:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        drop_all = [n for n in tensors if n.startswith(f"{module}.")]
        for name in drop_all:
            del tensors[name]
        tensors[f"{module}.weight"] = torch.zeros(64, 64, dtype=torch.float16)

    return edit


def regroup(tensors: dict[str, torch.Tensor]) -> None:
    """Groups of 48, which exllamav2 takes for groups of 64."""
    tensors["model.layers.1.mlp.down_proj.scales"] = torch.ones(2, 64, dtype=torch.float16)
    tensors["model.layers.1.mlp.down_proj.qzeros"] = torch.zeros(2, 8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("settings", "edit", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, drop("nothing"), "quantized as awq"),
        (GPTQ | {"bits": 8}, drop("nothing"), "8 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, drop("nothing"), "format marlin"),
        (GPTQ, drop("1.mlp.up_proj.qzeros"), "up_proj lack qzeros"),
        (EXL2, drop("0.self_attn.q_proj.q_groups"), "q_proj lack q_groups"),
        (EXL2, unquantize("model.layers.1.self_attn.o_proj"), "some are not, such as .*o_proj"),
        (EXL2, lambda tensors: [tensors.pop(n) for n in list(tensors) if "layers.1.mlp" in n], "are missing"),
        (EXL2, lambda tensors: [tensors.pop(n) for n in list(tensors) if "_proj" in n], "no tensor in it is quantized"),
    ],
)
def test_what_exllamav2_does_not_read_is_refused(
    make_quantized: Callable[..., Path], tmp_path: Path, settings: dict[str, Any], edit: Any, message: str
) -> None:
    source = make_quantized(settings, edit)
    with pytest.raises(SourceRefused, match=message):
        imported(source, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_groups_that_exllamav2_takes_for_others_are_refused(
    make_quantized: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_quantized(GPTQ, regroup)
    imported(source, tmp_path / "models", "two of 64 hold 96".replace(" ", "-"))

    def three_of_forty(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.scales"] = torch.ones(5, 64, dtype=torch.float16)
        tensors["model.layers.1.mlp.down_proj.qzeros"] = torch.zeros(5, 8, dtype=torch.int32)

    with pytest.raises(SourceRefused, match="not in groups that exllamav2 reads"):
        imported(make_quantized(GPTQ, three_of_forty), tmp_path / "models")


@pytest.mark.parametrize(
    ("arguments", "message"), [({"dtype": "bfloat16"}, "dtype cannot be chosen"), ({"adapter": None}, "merged")]
)
def test_quantized_weights_cannot_be_changed(
    make_quantized: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path: Path, arguments: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    if "adapter" in arguments:
        arguments = {"adapter": make_adapter()}
    with pytest.raises(SourceRefused, match=message):
        imported(make_quantized(), tmp_path / "models", **arguments)


def test_an_architecture_of_the_torch_engine_only_is_refused(
    make_quantized: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_quantized()
    config = json.loads((source / "config.json").read_bytes())
    (source / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(ArchitectureRefused, match="activation is gelu"):
        imported(source, tmp_path / "models")


def test_the_torch_engine_refuses_quantized_weights(make_quantized: Callable[..., Path], tmp_path: Path) -> None:
    card = imported(make_quantized(), tmp_path / "models")
    kept = tmp_path / "models" / "q"
    with pytest.raises(EngineRefused, match=r"exl2-4\.0bpw.*PREREAD_ENGINE=exl2"):
        load_model(kept, "float32", "cpu")
    with pytest.raises(EngineRefused):
        open_host(EngineConfig(store_dir=str(tmp_path / "store"), model_dir=str(kept), kv_type="fp16"))
    check_engine(card, "exl2")


def test_without_a_card_the_kv_types_wait_for_one(
    make_quantized: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "card_engine_ready", lambda: False)
    card = imported(make_quantized(), tmp_path / "models")
    assert card.kv_types == {}
    check_kv_type(card, KVType.FP16)
    with pytest.raises(KVTypeRefused, match="preread models measure q"):
        check_kv_type(card, KVType.K8V4)
    with pytest.raises(EngineRefused, match="NVIDIA card"):
        measure_model(tmp_path / "models" / "q")


def test_a_measured_gate_is_recorded(make_quantized: Callable[..., Path], tmp_path: Path) -> None:
    gate = {"k8v4": KVGate(mean_kl=0.001, p99_kl=0.01, top1_agreement=0.99, allowed=True)}
    imported(make_quantized(), tmp_path / "models")
    assert measure_model(tmp_path / "models" / "q", measure=lambda *_: gate).kv_types == gate


def test_a_changed_byte_of_a_kept_file_is_found(make_quantized: Callable[..., Path], tmp_path: Path) -> None:
    source = make_quantized()
    imported(source, tmp_path / "models")
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.raises(ModelDamaged, match="weights"):
        verify_model(tmp_path / "models" / "q")


def test_plain_directories_are_not_quantized(source: Path) -> None:
    assert find_quantization(source) is None
    assert Quantization("exl2", {}).label == "exl2"


def test_the_commands_say_what_such_a_model_needs(
    make_quantized: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(gates, "card_engine_ready", lambda: False)
    source = make_quantized(GPTQ)

    def preread(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["models", *arguments])

    made = preread("import", str(source), "--name", "q")
    assert made.exit_code == 0, made.output
    listed = preread("list").stdout
    assert "gptq-4bit-32g (exl2 engine)" in listed
    assert "fp16 only until `preread models measure q` has run on a machine with an NVIDIA card" in listed
    (row,) = json.loads(preread("list", "--json").stdout)["models"]
    assert row["quantization"] == "gptq-4bit-32g"
    assert preread("verify", "q").exit_code == 0
    measured = preread("measure", "q")
    assert measured.exit_code == 1
    assert "can be measured only where there are an NVIDIA card" in measured.stderr.replace("\n", " ")
