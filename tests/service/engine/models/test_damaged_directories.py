"""Directories with one damage each: whoever looks at one before anything is loaded refuses it with a sentence."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from service.cli import main
from service.doctor.examine import examine
from service.engine.exl2_engine.model import UnsupportedModel
from service.engine.models.convert.needs import check_source
from service.engine.models.errors import ModelError
from service.engine.models.importer import check_readable, import_model
from tests.service.doctor.machine import Machine, settings
from tests.service.engine.models.packed import exl2_parts
from tests.service.engine.models.test_quantized import gptq_parts

EXL2 = {"quant_method": "exl2", "bits": 4.0}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
DEEP = '{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
NESTED = '{"model_type": "llama", "x": ' + "[" * 500 + "]" * 500 + "}"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST = "model.embed_tokens.weight"
Damage = Callable[[Path], Any]


def config(*removed: str, **changes: Any) -> Damage:
    def damage(directory: Path) -> None:
        stored = json.loads((directory / "config.json").read_bytes()) | changes
        kept = {key: value for key, value in stored.items() if key not in removed}
        (directory / "config.json").write_text(json.dumps(kept))

    return damage


def text(name: str, content: str) -> Damage:
    return lambda directory: (directory / name).write_text(content)


def index(weight_map: Any) -> Damage:
    return text(INDEX, json.dumps({"weight_map": weight_map}))


def header(change: Callable[[Any], Any]) -> Damage:
    """`change` gives another header, or changes the one it gets."""

    def damage(directory: Path) -> None:
        data = (directory / WEIGHTS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        read = json.loads(data[8 : 8 + length])
        read.pop("__metadata__", None)
        found = change(read)
        encoded = found.encode() if isinstance(found, str) else json.dumps(read if found is None else found).encode()
        (directory / WEIGHTS).write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + length :])

    return damage


def entry(**changes: Any) -> Damage:
    return header(lambda read: read[FIRST].update(changes))


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(directory: Path) -> None:
        stored = load_file(directory / WEIGHTS)
        change(stored)
        save_file(stored, directory / WEIGHTS)

    return damage


def without(ending: str) -> Damage:
    def drop(stored: dict[str, torch.Tensor]) -> None:
        for name in [name for name in stored if name.endswith(ending)]:
            del stored[name]

    return tensors(drop)


def size(nbytes: int) -> Damage:
    return lambda directory: os.truncate(directory / WEIGHTS, (directory / WEIGHTS).stat().st_size + nbytes)


def rename(new: str) -> Damage:
    return lambda directory: (directory / WEIGHTS).rename(directory / new)


def old_gptq(**changes: Any) -> Damage:
    def damage(directory: Path) -> None:
        config("quantization_config")(directory)
        (directory / "quantize_config.json").write_text(json.dumps(GPTQ | changes))

    return damage


def rope(**values: Any) -> Damage:
    return config(rope_parameters=values)


PLAIN: dict[str, tuple[Damage, str]] = {
    "an absent shard": (index({FIRST: WEIGHTS, "x": "model-00002-of-00002.safetensors"}), "model-00002-of-00002"),
    "an index elsewhere": (index({FIRST: "../model.safetensors"}), "which is not there"),
    "a map that is a list": (index([WEIGHTS]), "weight_map"),
    "a map of numbers": (index({FIRST: 5}), "weight_map"),
    "an index without a map": (text(INDEX, "{}"), "weight_map"),
    "an index that is a list": (text(INDEX, "[]"), "not a JSON object"),
    "a deep index": (text(INDEX, DEEP), "nested"),
    "no index of shards": (rename("model-00001-of-00002.safetensors"), "neither model.safetensors nor"),
    "a cut file": (size(-1000), "1,000 of its"),
    "a file with more": (size(10), "10 bytes behind"),
    "a file cut in its header": (lambda d: os.truncate(d / WEIGHTS, 100), "cut off in its header"),
    "an empty file": (text(WEIGHTS, ""), "not a safetensors file"),
    "a header that is a list": (header(lambda _: []), "damaged header"),
    "a header that is no JSON": (header(lambda _: "{{{{"), "damaged header"),
    "a deep header": (header(lambda _: DEEP), "damaged header"),
    "an entry that is a list": (header(lambda read: read.update({FIRST: [1]})), FIRST),
    "an entry without offsets": (header(lambda read: read[FIRST].pop("data_offsets") and None), FIRST),
    "an entry without a dtype": (header(lambda read: read[FIRST].pop("dtype") and None), FIRST),
    "an entry without a shape": (header(lambda read: read[FIRST].pop("shape") and None), FIRST),
    "a shape of texts": (entry(shape=["384", "64"]), FIRST),
    "a negative shape": (entry(shape=[-384, -64]), FIRST),
    "an absurd shape": (entry(shape=[10**30, 64]), FIRST),
    "another shape": (entry(shape=[384, 65]), FIRST),
    "an unknown dtype": (entry(dtype="F99"), "F99"),
    "a dtype that is a list": (entry(dtype=["F32"]), FIRST),
    "offsets that overlap": (entry(data_offsets=[100, 100 + 4 * 384 * 64]), "damaged header"),
    "negative offsets": (entry(data_offsets=[-8, 4 * 384 * 64 - 8]), FIRST),
    "absurd offsets": (entry(data_offsets=[10**30, 10**30 + 4 * 384 * 64]), FIRST),
    "three offsets": (entry(data_offsets=[0, 1, 2]), FIRST),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json"),
    "a config that is a list": (text("config.json", "[]"), "not a JSON object"),
    "a config that is no JSON": (text("config.json", "{"), "cannot be read as JSON"),
    "a config in another encoding": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe{\x00"), "as JSON"),
    "a deep config": (text("config.json", DEEP), "nested"),
    "a config nested enough for others": (text("config.json", NESTED), "nested"),
    "a huge config": (lambda d: os.truncate(d / "config.json", 1 << 30), "bytes"),
    "no type": (config("model_type"), "model_type"),
    "a type that is a list": (config(model_type=["llama"]), "model_type is ['llama']"),
    "another type": (config(model_type="gemma2"), "soft-capped"),
    "an unknown type": (config(model_type="x" * 20), "not supported"),
    "another type with its sizes elsewhere": (config("hidden_size", model_type="gemma3"), "sliding windows"),
    "no width": (config("hidden_size"), "lacks hidden_size"),
    "a width that is a text": (config(hidden_size="64"), "hidden_size is '64'"),
    "a width that is true": (config(hidden_size=True), "hidden_size is True"),
    "a width that is a fraction": (config(hidden_size=64.0), "hidden_size is 64.0"),
    "a MLP width for each layer": (config(intermediate_size=[96, 96]), "intermediate_size is [96, 96]"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads is 0"),
    "heads that do not divide": (config("head_dim", num_attention_heads=3, num_key_value_heads=3), "does not divide"),
    "no KV heads": (config(num_key_value_heads=0), "num_key_value_heads is 0"),
    "too many KV heads": (config(num_key_value_heads=10**30), "num_key_value_heads is 1000"),
    "KV heads that are a text": (config(num_key_value_heads="2"), "num_key_value_heads is '2'"),
    "KV heads that are a list": (config(num_key_value_heads=[2]), "num_key_value_heads is [2]"),
    "KV heads that do not divide": (config(num_key_value_heads=3), "does not divide"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "too many layers": (config(num_hidden_layers=10**9), "num_hidden_layers"),
    "a vocabulary of null": (config(vocab_size=None), "vocab_size is None"),
    "a context that is a text": (config(max_position_embeddings="512"), "max_position_embeddings is '512'"),
    "a context of null": (config(max_position_embeddings=None), "max_position_embeddings is None"),
    "a head dim that is a text": (config(head_dim="32"), "head_dim is '32'"),
    "an odd head dim": (config(head_dim=48), "head dim 48"),
    "RoPE that is a list": (config(rope_parameters=[1]), "rope_parameters is [1]"),
    "scaling that is a list": (config(rope_scaling=[1]), "rope_scaling is [1]"),
    "dynamic RoPE": (config(rope_scaling={"type": "dynamic", "factor": 2.0}), "RoPE type is dynamic"),
    "RoPE without a factor": (rope(rope_type="yarn"), "lacks factor"),
    "a factor that is a text": (rope(rope_type="linear", factor="2"), "factor is '2'"),
    "a type of RoPE that is a list": (rope(rope_type=["yarn"]), "rope_type is ['yarn']"),
    "theta that is null": (rope(rope_type="default", rope_theta=None), "lacks rope_theta"),
    "NaN": (config(rms_norm_eps=float("nan")), "rms_norm_eps"),
    "a window": (config(model_type="mistral", sliding_window=256), "sliding window of 256"),
    "Mistral's window": (config("sliding_window", model_type="mistral", max_position_embeddings=32768), "of 4096"),
    "layers with a window": (config(layer_types=["sliding_attention"] * 2), "layers of sliding_attention"),
    "layer types that are a text": (config(layer_types="full_attention"), "layer_types"),
    "too few layer types": (config(layer_types=["full_attention"]), "layer_types names 1 of 2"),
    "layers of different sizes": (config(per_layer_config={"0": {"num_key_value_heads": 1}}), "per_layer_config"),
    "experts": (config(num_local_experts=8), "mixture of 8 experts"),
    "experts that are a text": (config(num_local_experts="many"), "num_local_experts is 'many'"),
    "capped scores": (config(attn_logit_softcapping=50.0), "scores are soft-capped"),
    "capped logits": (config(final_logit_softcapping=30.0), "logits are soft-capped"),
    "an ending that is a text": (config(eos_token_id="</s>"), "eos_token_id"),
    "a quantization that is a text": (config(quantization_config="gptq"), "quantization_config is 'gptq'"),
    "a quantization that is not read": (config(quantization_config={"quant_method": "fp8"}), "quantized as fp8"),
    "EXL2 that is plain": (config(quantization_config=EXL2), "no tensor in it is quantized"),
}  # fmt: skip
QUANTIZED: dict[str, tuple[dict[str, Any], Damage, str]] = {
    "EXL2 bits that are a text": (EXL2, config(quantization_config=EXL2 | {"bits": "4"}), "bits is '4'"),
    "EXL2 without its order": (EXL2, without("q_invperm"), "lack q_invperm"),
    "EXL2 in a flat shape": (
        EXL2, tensors(lambda s: s.update({n: t.flatten() for n, t in s.items() if n.endswith("q_weight")})), "q_weight",
    ),
    "EXL2 of which no config says so": (EXL2, config("quantization_config"), "no quantization_config"),
    "EXL2 without a layer": (EXL2, config(num_hidden_layers=3), "model.layers.2.self_attn.* are missing"),
    "EXL2 with a window": (EXL2, config(model_type="mistral", sliding_window=256), "sliding window of 256"),
    "EXL2 of a type that no card has": (EXL2, config(model_type="olmo2"), "olmo2 are not supported on the exl2"),
    "a cut EXL2 file": (EXL2, size(-10), "10 of its"),
    "GPTQ of 8 bits": (GPTQ, config(quantization_config=GPTQ | {"bits": 8}), "of 8 bits are not read"),
    "GPTQ bits that are a text": (GPTQ, config(quantization_config=GPTQ | {"bits": "4"}), "bits is '4'"),
    "old GPTQ of 8 bits": (GPTQ, old_gptq(bits=8), "of 8 bits are not read"),
    "old GPTQ that is a list": (GPTQ, lambda d: (old_gptq()(d), text("quantize_config.json", "[4]")(d)), "JSON object"),
    "Marlin": (GPTQ, config(quantization_config=GPTQ | {"checkpoint_format": "marlin"}), "format marlin"),
    "a GPTQ format that is a list": (
        GPTQ, config(quantization_config=GPTQ | {"checkpoint_format": ["gptq"]}), "checkpoint_format",
    ),
    "GPTQ without scales": (GPTQ, without("scales"), "lack scales"),
    "GPTQ without groups": (
        GPTQ, tensors(lambda s: s.update({n: t[:0] for n, t in s.items() if n.endswith("scales")})), "not in groups",
    ),
}  # fmt: skip
TOKENIZERS: dict[str, tuple[Damage, str]] = {
    "an empty object": (text("tokenizer.json", "{}"), "tokenizer.json: model is None"),
    "a list": (text("tokenizer.json", "[]"), "not a JSON object"),
    "no JSON": (text("tokenizer.json", "{"), "cannot be read as JSON"),
    "deep": (text("tokenizer.json", DEEP), "nested"),
    "a model that is a list": (text("tokenizer.json", '{"model": []}'), "model is []"),
    "a vocabulary of texts": (text("tokenizer.json", '{"model": {"vocab": {"a": "0"}}}'), "vocab is no table"),
    "a vocabulary of numbers": (text("tokenizer.json", '{"model": {"vocab": [1, 2]}}'), "vocab is no table"),
    "an absurd id": (text("tokenizer.json", '{"model": {"vocab": {"a": 1000000000000}}}'), "vocab is no table"),
    "merges that are numbers": (text("tokenizer.json", '{"model": {"vocab": {}, "merges": [1]}}'), "its merges"),
    "added tokens that are texts": (
        text("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": ["a"]}'), "added_tokens are no tokens",
    ),
    "added tokens without an id": (
        text("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": [{"content": "a"}]}'), "are no tokens",
    ),
}  # fmt: skip


def quantize(directory: Path, how: dict[str, Any]) -> None:
    parts = exl2_parts if how["quant_method"] == "exl2" else gptq_parts
    found: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / WEIGHTS).items():
        packed = parts(*tensor.shape) if "_proj" in name else {}
        found |= {f"{name.removesuffix('.weight')}.{part}": t for part, t in packed.items()} or {name: tensor}
    save_file(found, directory / WEIGHTS)
    config(quantization_config=how)(directory)


@pytest.fixture
def healthy(source: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copies the tiny Llama, quantized if told how."""

    def make(how: dict[str, Any] | None = None, name: str = "source") -> Path:
        directory = Path(shutil.copytree(source, tmp_path / name))
        if how:
            quantize(directory, how)
        return directory

    return make


def plan(*arguments: Any) -> tuple[int, dict[str, Any]]:
    """Exit code and what the command prints."""
    given = [str(argument) for argument in arguments]
    result = CliRunner().invoke(main, ["plan", *given, "--card", "t4", "--context", "256", "--json"])
    assert isinstance(result.exception, SystemExit | None), repr(result.exception)
    return result.exit_code, json.loads(result.stdout)


def told_by_plan(*arguments: Any) -> str:
    code, said = plan(*arguments)
    assert code == 1
    return said["error"]["message"] if "error" in said else "; ".join(said["problems"])


def told_by_import(directory: Path, models_dir: Path) -> str:
    with pytest.raises(ModelError) as refused:
        import_model(directory, name="m", models_dir=models_dir, measure=lambda *_: {}, find_heads=lambda *_: None)
    assert not list(models_dir.iterdir())
    assert str(models_dir) not in str(refused.value), "the source is meant, not what was removed again"
    return str(refused.value)


def told_by_doctor(directory: Path, tmp_path: Path) -> dict[str, str]:
    """By check. Also of the torch engine, which plans for a processor."""
    found: dict[str, str] = {}
    for engine in ("exl2", "torch"):
        checks = ["model", "gptq", "cache-size", "dtype", "disk-room"]
        for finding in examine(settings(tmp_path, engine=engine), Machine(), model_dir=directory, only=checks).findings:
            assert "ended with" not in finding.evidence
            found[f"{engine} {finding.check}"] = f"{finding.status} {finding.evidence}"
    return found


@pytest.mark.parametrize("how", [None, EXL2, GPTQ], ids=["plain", "exl2", "gptq"])
def test_healthy_directories_are_healthy(
    how: dict[str, Any] | None, healthy: Callable[..., Path], tmp_path: Path
) -> None:
    directory = healthy(how)
    assert plan(directory)[0] == 0
    assert plan(directory, "--draft-model", directory)[0] == 0
    told = told_by_doctor(directory, tmp_path)
    assert "an import refuses it" not in told["exl2 model"]
    assert told["exl2 cache-size"].startswith("ok")
    assert not told["exl2 gptq"].startswith("fail")
    check_readable(directory, None)
    if how is None:
        check_source(directory)
    import_model(directory, name="m", models_dir=tmp_path / "models", measure=lambda *_: {}, find_heads=lambda *_: None)
    assert plan(tmp_path / "models" / "m", "--kv-type", "fp16")[0] == 0


@pytest.mark.parametrize("damage", PLAIN)
def test_plain_weights(damage: str, healthy: Callable[..., Path], tmp_path: Path) -> None:
    make, message = PLAIN[damage]
    directory, whole = healthy(), healthy(name="whole")
    make(directory)
    assert message in told_by_plan(directory)
    assert message in told_by_plan(whole, "--draft-model", directory)
    assert message in told_by_import(directory, tmp_path / "models")
    told = told_by_doctor(directory, tmp_path)
    assert told["exl2 model"].startswith("fail")
    if (directory / "config.json").exists():
        assert message in told["exl2 model"]
    with pytest.raises((ModelError, UnsupportedModel)):
        check_source(directory)


@pytest.mark.parametrize("damage", QUANTIZED)
def test_quantized_weights(damage: str, healthy: Callable[..., Path], tmp_path: Path) -> None:
    how, make, message = QUANTIZED[damage]
    directory, whole = healthy(how), healthy(name="whole")
    make(directory)
    assert message in told_by_plan(directory)
    assert message in told_by_plan(whole, "--draft-model", directory)
    assert message in told_by_import(directory, tmp_path / "models")
    told = told_by_doctor(directory, tmp_path)
    assert message in told["exl2 model"]
    if how == GPTQ:
        assert told["exl2 gptq"].startswith("fail")
        assert message in told["exl2 gptq"]
    with pytest.raises(ModelError):
        check_source(directory)


@pytest.mark.parametrize("damage", TOKENIZERS)
def test_tokenizers(damage: str, healthy: Callable[..., Path], tmp_path: Path) -> None:
    make, message = TOKENIZERS[damage]
    directory, whole = healthy(), healthy(name="whole")
    make(directory)
    assert message in told_by_plan(whole, "--draft-model", directory)
    assert message in told_by_import(directory, tmp_path / "models")
    with pytest.raises(ModelError):
        check_readable(directory, None)


def test_a_model_that_fits_but_is_not_read_has_its_memory_shown(healthy: Callable[..., Path]) -> None:
    directory = healthy(GPTQ)
    config(quantization_config=GPTQ | {"bits": 8}, num_local_experts=4)(directory)
    said = plan(directory)[1]
    assert [problem.partition(":")[0] for problem in said["problems"]] == [
        "this llama model is not supported", "GPTQ weights of 8 bits are not read, only those of 4 bits",
    ]  # fmt: skip
    assert said["ledger"]["total_nbytes"] > 0


def test_no_context_helps_an_engine_that_does_not_read_the_weights(
    healthy: Callable[..., Path], tmp_path: Path
) -> None:
    (found,) = examine(
        settings(tmp_path, engine="torch"), Machine(), model_dir=healthy(GPTQ), only=["cache-size"]
    ).findings
    assert found.status == "fail"
    assert "the torch engine reads plain ones only" in found.evidence
    assert "no context and no KV type helps" in found.remedy
    assert "PREREAD_MAX_CONTEXT" not in found.remedy
