import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cache_store.layout import KVType
from service.engine.index_heads import IndexHead, IndexHeads, load_index_heads
from service.engine.models.card import KVGate, ModelCard, fingerprint, load_card
from service.engine.models.errors import (
    ArchitectureRefused,
    EngineRefused,
    ModelDamaged,
    ModelImportError,
    NameTaken,
    SourceRefused,
    TokenizerRefused,
)
from service.engine.models.heads import heads_again
from service.engine.models.huggingface import read_directory
from service.engine.models.importer import check_tokenizer, import_model, measure_model, verify_model
from service.engine.models.registry import list_models
from service.engine.models.source import silent
from service.engine.models.weights import weights_digest
from service.engine.models.writer import write_model
from service.engine.prompt import DEFAULT_SYSTEM_TEXT
from service.engine.tokenizer import Tokenizer

GATE = {"k8v4": KVGate(mean_kl=0.001, p99_kl=0.01, top1_agreement=0.99, allowed=True)}


def measured(directory: Path, card: ModelCard, progress: Any) -> dict[str, KVGate]:
    assert load_card(directory) == card
    return GATE


def imported(source: Path, models_dir: Path, name: str = "tiny", **arguments: Any) -> ModelCard:
    return import_model(source, name=name, models_dir=models_dir, measure=measured, **arguments)


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        return model(torch.tensor([[5, 9, 200, 31]])).logits


def test_the_imported_model_computes_what_the_source_does(source: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    card = imported(source, tmp_path, progress=lambda stage, done, total: stages.append(stage))
    assert torch.equal(logits(tmp_path / "tiny"), logits(source))
    assert card == load_card(tmp_path / "tiny") == verify_model(tmp_path / "tiny")
    assert (card.n_layers, card.n_heads, card.n_kv_heads, card.head_dim) == (2, 4, 2, 32)
    assert (card.max_context, card.vocab_size, card.dtype, card.eos_token_ids) == (512, 384, "float32", [2])
    assert card.kv_types == GATE
    assert card.prompt.document_prefix == "<|im_start|>system\n" + DEFAULT_SYSTEM_TEXT
    assert card.prompt.question_suffix == "<|im_end|>\n<|im_start|>assistant\n"
    assert card.n_parameters == AutoModelForCausalLM.from_pretrained(source).num_parameters()
    assert list(dict.fromkeys(stages)) == ["reading", "writing", "hashing"]
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]


def test_two_imports_of_one_source_are_one_identity(source: Path, tmp_path: Path) -> None:
    assert imported(source, tmp_path / "a").digests == imported(source, tmp_path / "b").digests


def test_an_adapter_is_merged(source: Path, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    card = imported(source, tmp_path / "models", adapter=make_adapter())
    before, after = (load_file(d / "model.safetensors") for d in (source, tmp_path / "models" / "tiny"))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    assert card.source == "tiny llama + adapter"


def test_large_models_are_split_and_read_the_same(source: Path, tmp_path: Path) -> None:
    whole = imported(source, tmp_path)
    split = tmp_path / "split"
    split.mkdir()
    write_model(read_directory(source, silent), split, torch.float32, silent, shard_nbytes=60_000)
    assert len(list(split.glob("*.safetensors"))) > 3
    assert weights_digest(split) == whole.digests.weights
    assert torch.equal(logits(split), logits(source))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_stored_dtype_can_be_chosen(source: Path, tmp_path: Path, dtype: str) -> None:
    card = imported(source, tmp_path, dtype=dtype)
    assert card.dtype == dtype
    stored = load_file(tmp_path / "tiny" / "model.safetensors")
    assert {str(t.dtype) for t in stored.values()} == {f"torch.{dtype}"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "tiny").dtype == getattr(torch, dtype)


def test_a_half_precision_source_stays_one(make_model: Callable[..., Path], tmp_path: Path) -> None:
    card = imported(make_model(tmp_path / "source", dtype=torch.bfloat16), tmp_path / "models")
    assert card.dtype == "bfloat16"


def flip_byte(directory: Path, position: int) -> None:
    data = bytearray((directory / "model.safetensors").read_bytes())
    data[position] ^= 1
    (directory / "model.safetensors").write_bytes(data)


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        text = (directory / name).read_text()
        assert old in text
        (directory / name).write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: flip_byte(d, -1), "weights"),
        (lambda d: flip_byte(d, -50_000), "weights"),
        (edit("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'), "weights"),
        (edit("tokenizer.json", '"<think>"', '"<thunk>"'), "tokenizer"),
        (edit("chat_template.jinja", "Be helpful.", "Be kind."), "template"),
        (edit("config.json", '"rope_theta": 10000.0', '"rope_theta": 20000.0'), "rope"),
    ],
)
def test_each_change_of_a_source_shows_in_its_own_field(
    source: Path, tmp_path: Path, change: Callable[[Path], None], field: str
) -> None:
    changed = Path(shutil.copytree(source, tmp_path / "changed"))
    change(changed)
    old, new = (
        fingerprint(imported(s, tmp_path / "models", name), KVType.K8V4, "float32", "torch/1", 512)
        for s, name in ((source, "old"), (changed, "new"))
    )
    assert old.differences(new) == (field,)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: flip_byte(d, -1), "weights"),
        (edit("config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 1'), "config"),
        (edit("tokenizer.json", '"<think>"', '"<thunk>"'), "tokenizer"),
        (edit("chat_template.jinja", "Be helpful.", "Be patient."), "template"),
        (edit("config.json", '"rope_theta": 10000.0', '"rope_theta": 20000.0'), "rope"),
    ],
)
def test_verify_finds_what_the_sizes_do_not_show(
    source: Path, tmp_path: Path, change: Callable[[Path], None], field: str
) -> None:
    imported(source, tmp_path)
    change(tmp_path / "tiny")
    load_card(tmp_path / "tiny")
    with pytest.raises(ModelDamaged, match=field):
        verify_model(tmp_path / "tiny")


def test_the_system_text_is_part_of_the_prompt(source: Path, tmp_path: Path) -> None:
    one, other = (imported(source, tmp_path, name, system_text=f"Text {name}. ") for name in ("a", "b"))
    assert one.prompt.document_prefix == "<|im_start|>system\nText a. "
    assert one.digests.template != other.digests.template
    assert one.digests.weights == other.digests.weights


def test_a_name_is_taken_until_replacing_is_allowed(source: Path, tmp_path: Path) -> None:
    imported(source, tmp_path)
    with pytest.raises(NameTaken, match="a model tiny"):
        imported(source, tmp_path)
    card = imported(source, tmp_path, replace=True, dtype="bfloat16")
    assert verify_model(tmp_path / "tiny") == card
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    ("prepare", "error", "message"),
    [
        (lambda d: shutil.rmtree(d), SourceRefused, "does not exist"),
        (lambda d: (d / "config.json").unlink(), SourceRefused, r"no config\.json"),
        (lambda d: (d / "config.json").write_text("{"), SourceRefused, "cannot be read"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), SourceRefused, "pickled"),
        (lambda d: (d / "model.safetensors").unlink(), SourceRefused, "no weights"),
        (lambda d: (d / "model.safetensors").write_bytes(b"junk"), SourceRefused, "not a safetensors file"),
        (edit("config.json", '"model_type": "llama"', '"model_type": "gpt2"'), ArchitectureRefused, "gpt2"),
        (edit("config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 3'), SourceRefused, "lacks 9"),
        (
            lambda d: (d / "chat_template.jinja").write_text("{{ messages[-1].content }}"),
            SourceRefused,
            "does not keep the document",
        ),
    ],
)
def test_a_refused_import_leaves_nothing(
    source: Path, tmp_path: Path, prepare: Callable[[Path], Any], error: type[Exception], message: str
) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "source"))
    prepare(copy)
    with pytest.raises(error, match=message):
        imported(copy, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_failure_at_the_end_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def fails(directory: Path, card: ModelCard, progress: Any) -> dict[str, KVGate]:
        raise ModelImportError("the gate could not run")

    with pytest.raises(ModelImportError, match="could not run"):
        import_model(source, name="tiny", models_dir=tmp_path, measure=fails)
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(SourceRefused, match="cannot name a model"):
        imported(tmp_path / "absent", tmp_path, "../escape")
    with pytest.raises(SourceRefused, match="not a dtype"):
        imported(tmp_path / "absent", tmp_path, dtype="int4")


def test_what_a_killed_import_left_is_removed_by_the_next(source: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from service.engine.models.importer import import_model\n"
        "kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "import_model(Path(sys.argv[1]), name='tiny', models_dir=Path(sys.argv[2]), measure=kill)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(source), str(tmp_path)], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".")
    assert list_models(tmp_path) == []
    imported(source, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]


def test_an_import_does_not_sweep_another_that_is_running(source: Path, tmp_path: Path) -> None:
    def nested(directory: Path, card: ModelCard, progress: Any) -> dict[str, KVGate]:
        imported(source, tmp_path, "inner")
        return measured(directory, card, progress)

    import_model(source, name="outer", models_dir=tmp_path, measure=nested)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["inner", "outer"]
    assert verify_model(tmp_path / "outer").name == "outer"


def test_the_gate_can_be_run_again(source: Path, tmp_path: Path) -> None:
    card = import_model(source, name="tiny", models_dir=tmp_path, measure=lambda *_: {})
    assert card.kv_types == {}
    assert measure_model(tmp_path / "tiny", measure=measured).kv_types == GATE
    assert verify_model(tmp_path / "tiny").kv_types == GATE


def test_an_unwritable_place_is_an_os_error(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        imported(source, tmp_path / "file" / "models")


def test_a_gguf_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(SourceRefused, match="cannot be read as a GGUF: it is of version"):
        imported(tmp_path / "model.bin", tmp_path / "models")
    (tmp_path / "model.gguf").write_bytes(b"PK\3\4")
    with pytest.raises(SourceRefused, match="it does not begin as one"):
        imported(tmp_path / "model.gguf", tmp_path / "models")


def test_a_tokenizer_that_reads_control_tokens_in_text_is_refused(tokenizer_json: bytes) -> None:
    check_tokenizer(Tokenizer(tokenizer_json))
    document = json.loads(tokenizer_json)
    merges = [["<", "|"], ["<|", "x"], ["<|x", ">"]]
    vocab = {"<|": 900, "<|x": 901, "<|x>": 902}
    document["model"]["merges"] = merges + document["model"]["merges"]
    document["model"]["vocab"] |= vocab
    document["pre_tokenizer"] = None
    document["added_tokens"].append(document["added_tokens"][0] | {"id": 902, "content": "<|x>"})
    with pytest.raises(TokenizerRefused, match=r"'<\|x>' in a document as a control token"):
        check_tokenizer(Tokenizer(json.dumps(document).encode()))
    document = json.loads(tokenizer_json) | {"decoder": {"type": "WordPiece", "prefix": "#", "cleanup": True}}
    with pytest.raises(TokenizerRefused, match="decoder"):
        check_tokenizer(Tokenizer(json.dumps(document).encode()))


def test_files_are_readable_by_others(source: Path, tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        imported(source, tmp_path)
    finally:
        os.umask(old)
    assert {oct(p.stat().st_mode & 0o777) for p in (tmp_path / "tiny").iterdir()} == {"0o644"}


def test_silent_progress_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    silent("reading", 0, 1)
    assert capsys.readouterr() == ("", "")


def test_the_loader_draws_no_bar_over_ours(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(stderr=True)

    def draw(stage: str, done: int, total: int) -> None:
        console.print(f"{stage} {done}/{total}")

    imported(source, tmp_path, progress=draw)
    told = capsys.readouterr()
    assert told.out == ""
    assert {line.split()[0] for line in told.err.splitlines()} == {"reading", "writing", "hashing"}
    assert "reading 1/3" in told.err


def found_heads(directory: Path, card: ModelCard, progress: Any) -> IndexHeads:
    return IndexHeads(1, load_card(directory).digests.weights, [IndexHead(1, 0, 0.9)], 0.9, 1.0, 20)


def test_the_index_heads_that_are_found_come_with_the_model(source: Path, tmp_path: Path) -> None:
    imported(source, tmp_path, find_heads=found_heads)
    assert load_index_heads(tmp_path / "tiny") == [(1, 0)]
    assert verify_model(tmp_path / "tiny").name == "tiny"


def test_a_model_of_a_short_context_has_no_index_heads(source: Path, tmp_path: Path) -> None:
    imported(source, tmp_path)
    assert load_index_heads(tmp_path / "tiny") == []
    with pytest.raises(EngineRefused, match="context of 512"):
        heads_again(tmp_path / "tiny")


def test_what_needs_no_look_at_the_source_is_refused_before_it_is_read(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.gguf").write_bytes(b"GG")
    for source, more, said in (
        ("m.gguf", {"engine": "llamacpp", "dtype": "float16"}, "leave --dtype out"),
        ("m.gguf", {"adapter": tmp_path / "empty"}, "adapter_config.json"),
        ("cut.gguf", {}, "it is cut off"),
    ):
        with pytest.raises(ModelImportError, match=said):
            import_model(
                tmp_path / source, name="m", models_dir=tmp_path / "models",
                progress=lambda stage, done, total: told.append(f"{stage} {done}"), **more,
            )  # fmt: skip
        assert set(told) <= {"reading 0"}
