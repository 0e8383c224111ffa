import ast
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cache_store.layout import KVType
from service.engine.models.card import (
    CARD_NAME,
    KVGate,
    ModelCard,
    ModelDigests,
    check_kv_type,
    fingerprint,
    load_card,
    save_card,
)
from service.engine.models.errors import (
    CardVersionUnknown,
    KVTypeRefused,
    ModelDamaged,
    ModelNotFound,
    SourceRefused,
)
from service.engine.models.registry import check_name, find_model, list_models
from service.engine.prompt import PromptParts

CARD = ModelCard(
    format_version=1,
    name="tiny",
    source="tiny.gguf",
    architecture="llama",
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    max_context=512,
    vocab_size=384,
    n_parameters=1000,
    dtype="float32",
    eos_token_ids=[2],
    quantization="none",
    digests=ModelDigests(weights="w", config="c", tokenizer="t", template="p", rope="r"),
    prompt=PromptParts("system", "end", "user", "assistant", "end"),
    files={"model.safetensors": 3},
    kv_types={
        "k8v4": KVGate(mean_kl=0.001, p99_kl=0.01, top1_agreement=0.99, allowed=True),
        "k4v4": KVGate(mean_kl=0.1234, p99_kl=1.0, top1_agreement=0.8, allowed=False),
    },
)


def written(directory: Path, card: ModelCard = CARD) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").write_bytes(b"abc")
    save_card(card, directory)
    return directory


def test_round_trip(tmp_path: Path) -> None:
    assert load_card(written(tmp_path / "a model")) == CARD


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (
            lambda d: (d / "model.safetensors").write_bytes(b"ab"),
            ModelDamaged,
            "has 2 bytes, recorded were 3",
        ),
        (lambda d: (d / "model.safetensors").unlink(), ModelDamaged, "is missing"),
        (lambda d: (d / CARD_NAME).unlink(), ModelNotFound, "not an imported model"),
        (lambda d: (d / CARD_NAME).write_bytes(b"{"), ModelDamaged, "not a model card"),
        (lambda d: (d / CARD_NAME).write_bytes(b"\xff"), ModelDamaged, "not a model card"),
        (lambda d: (d / CARD_NAME).write_bytes(b'{"format_version": 1}'), ModelDamaged, "not a model card"),
        (
            lambda d: (d / CARD_NAME).write_bytes(b'{"format_version": 9}'),
            CardVersionUnknown,
            "format version 9",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, damage, error: type[Exception], message: str) -> None:
    damage(written(tmp_path / "m"))
    with pytest.raises(error, match=message):
        load_card(tmp_path / "m")


def test_a_hugging_face_directory_is_told_to_import(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="preread models import"):
        load_card(tmp_path)
    with pytest.raises(ModelNotFound, match="there is no model directory"):
        load_card(tmp_path / "none")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"digests": msgspec.structs.replace(CARD.digests, weights="x")}, "weights"),
        ({"digests": msgspec.structs.replace(CARD.digests, config="x")}, "weights"),
        ({"digests": msgspec.structs.replace(CARD.digests, tokenizer="x")}, "tokenizer"),
        ({"digests": msgspec.structs.replace(CARD.digests, template="x")}, "template"),
        ({"digests": msgspec.structs.replace(CARD.digests, rope="x")}, "rope"),
        ({"quantization": "exl2"}, "quantization"),
        ({"name": "other", "source": "other", "max_context": 9, "files": {}}, None),
    ],
)
def test_each_identity_has_its_field(change: dict, field: str | None) -> None:
    old = fingerprint(CARD, KVType.K8V4, "float32", "torch/1", 512)
    new = fingerprint(msgspec.structs.replace(CARD, **change), KVType.K8V4, "float32", "torch/1", 512)
    assert old.differences(new) == ((field,) if field else ())


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((KVType.K8V8, "float32", "torch/1", 512), "kv"),
        ((KVType.K8V4, "bfloat16", "torch/1", 512), "compute_dtype"),
        ((KVType.K8V4, "float32", "torch/2", 512), "engine"),
        ((KVType.K8V4, "float32", "torch/1", 256), "chunking"),
    ],
)
def test_each_number_has_its_field(arguments: tuple, field: str) -> None:
    old = fingerprint(CARD, KVType.K8V4, "float32", "torch/1", 512)
    assert old.differences(fingerprint(CARD, *arguments)) == (field,)


def test_a_failed_gate_refuses_with_its_figure() -> None:
    check_kv_type(CARD, KVType.FP16)
    check_kv_type(CARD, KVType.K8V4)
    with pytest.raises(KVTypeRefused, match=r"0\.1234 nats, the limit is 0.02; use one of fp16, k8v4"):
        check_kv_type(CARD, KVType.K4V4)
    with pytest.raises(KVTypeRefused, match="not measured"):
        check_kv_type(CARD, KVType.K8V8)


def test_models_are_found_by_name_or_path(tmp_path: Path) -> None:
    models = tmp_path / "models"
    directory = written(models / "tiny")
    assert find_model("tiny", models) == find_model(str(directory), tmp_path / "none") == directory.resolve()
    with pytest.raises(ModelNotFound, match=r"imported there: tiny"):
        find_model("absent", models)
    (models / "tiny" / "model.safetensors").unlink()
    written(models / "other", msgspec.structs.replace(CARD, name="other"))
    (models / ".import-x").mkdir()
    found = dict(list_models(models))
    assert found[models / "other"].name == "other"
    assert isinstance(found[models / "tiny"], ModelDamaged)
    assert len(found) == 2
    assert list_models(tmp_path / "none") == []


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a b", ".hidden", "x" * 65, "a\0b", "é"])
def test_a_name_is_one_plain_directory(name: str) -> None:
    with pytest.raises(SourceRefused):
        check_name(name)


def test_reading_a_card_loads_no_model_library() -> None:
    code = (
        "import sys, service.engine.models.card, service.engine.models.registry, service.engine.prompt;"
        "print([m for m in ('torch', 'transformers', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []
