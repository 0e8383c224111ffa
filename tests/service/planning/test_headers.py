"""Models are read from the headers of their files: those here are sparse, with no weights behind the headers."""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from gguf import GGMLQuantizationType, GGUFWriter

from cache_store.layout import KVLayout, KVType
from service.cli import main
from service.engine.exl2_engine import loading, loading_pair
from service.engine.exl2_engine.graph_sizes import DRAFT_TOKENS
from service.engine.models.errors import ArchitectureRefused, ModelNotFound, SourceRefused
from service.engine.models.gguf_sizes import Sizes, shapes_of
from service.planning import request
from service.planning.cards import CARDS, CONTEXT_NBYTES
from service.planning.headers import read_model
from service.planning.ledgers import plan_ledger
from service.planning.request import Wanted
from tests.service.engine.models.test_gguf import write_model

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 5120, "intermediate_size": 21504, "num_hidden_layers": 64,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 152064,
    "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip
WIDTHS = {"I32": 4, "I16": 2, "F16": 2, "BF16": 2}
LINEARS = {
    "self_attn.q_proj": (5120, 5120), "self_attn.k_proj": (5120, 1024), "self_attn.v_proj": (5120, 1024),
    "self_attn.o_proj": (5120, 5120), "mlp.gate_proj": (5120, 21504), "mlp.up_proj": (5120, 21504),
    "mlp.down_proj": (21504, 5120),
}  # fmt: skip
N_LAYERS = 64 * sum(a * b for a, b in LINEARS.values())

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def plain(name: str, n_in: int, n_out: int) -> Tensors:
    return {f"{name}.weight": ("BF16", (n_out, n_in))}


def exl2(name: str, n_in: int, n_out: int, bits: int = 4) -> Tensors:
    groups = n_in // 128
    return {
        f"{name}.q_weight": ("I32", (n_in * bits // 32, n_out)),
        f"{name}.q_scale": ("I32", (groups, n_out // 8)),
        f"{name}.q_scale_max": ("F16", (groups,)),
        f"{name}.q_groups": ("I16", (2 * groups,)),
        f"{name}.q_invperm": ("I32", (n_in,)),
    }


def gptq(name: str, n_in: int, n_out: int) -> Tensors:
    groups = n_in // 128
    return {
        f"{name}.qweight": ("I32", (n_in // 8, n_out)),
        f"{name}.qzeros": ("I32", (groups, n_out // 8)),
        f"{name}.scales": ("F16", (groups, n_out)),
        f"{name}.g_idx": ("I32", (n_in,)),
    }


def write(directory: Path, linear: Any, quantization: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A model directory of 27B shape in some kilobytes of disk."""
    tensors: Tensors = {"model.embed_tokens.weight": ("F16", (152064, 5120)), "model.norm.weight": ("F16", (5120,))}
    for layer in range(64):
        for name, (n_in, n_out) in LINEARS.items():
            tensors |= linear(f"model.layers.{layer}.{name}", n_in, n_out)
    tensors |= plain("lm_head", 5120, 152064)
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        first, end = end, end + WIDTHS[dtype] * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}
    directory.mkdir()
    encoded = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    os.truncate(directory / "model.safetensors", 8 + len(encoded) + end)
    config = CONFIG | ({"quantization_config": quantization} if quantization else {}) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_gguf(path: Path, *, hidden: int = 4096, n_parts: int = 0) -> Path:
    """A Llama of 8B shape in Q4_K, or one of the parts of it."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(32)
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(14_336)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([b""] * 128_256)
    writer.add_token_merges(["a b"])
    if n_parts:
        writer.add_uint16("split.count", n_parts)
    sizes = Sizes("llama", hidden, 14_336, 32, 32, 8, hidden // 32, 128_256, 8192, ())
    nbytes = 0
    for name, shape in ({"output.weight": (128_256, hidden)} | shapes_of(sizes)).items():
        is_matrix = len(shape) > 1
        nbytes += (size := int(np.prod(shape)) // 256 * 144 if is_matrix else 4 * shape[0])
        kind = GGMLQuantizationType.Q4_K if is_matrix else GGMLQuantizationType.F32
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + nbytes + 64)
    return path


def preread(*arguments: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["plan", *arguments])
    assert result.exit_code == exit_code, result.output
    assert "Traceback" not in result.output
    return result


def test_exl2_weights_are_counted_as_they_lie_on_a_card(tmp_path: Path) -> None:
    model = read_model(write(tmp_path / "m", exl2, {"quant_method": "exl2", "bits": 4.0}))
    assert (model.kind, model.label, model.max_context) == ("exl2", "exl2-4.0bpw", 32768)
    assert model.n_parameters == N_LAYERS + 2 * 152064 * 5120 + 5120
    assert model.step_nbytes == pytest.approx(N_LAYERS / 2 * 1.01 + 152064 * 5120 * 2, rel=0.01)
    assert model.weights_nbytes - model.step_nbytes == 152064 * 5120 * 2
    assert model.notes == ("not imported yet: which KV types it stands is measured by `preread models import`",)


def test_gptq_and_plain_weights(tmp_path: Path) -> None:
    quantized = read_model(write(tmp_path / "q", gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128}))
    assert (quantized.kind, quantized.label) == ("gptq", "gptq-4bit-128g")
    assert quantized.n_parameters == N_LAYERS + 2 * 152064 * 5120 + 5120
    whole = read_model(write(tmp_path / "p", plain))
    assert (whole.kind, whole.label, whole.bits) == ("plain", "plain BF16", 16.0)
    assert whole.weights_nbytes == 2 * whole.n_parameters
    joined = 64 * (5120 * 5120 + 2 * 5120 * 1024 + 2 * 5120 * 21504)
    assert whole.joined_params == joined


def test_the_command_that_converts_names_the_model_as_it_was_given(tmp_path: Path) -> None:
    path = write(tmp_path / "my model", plain)
    said = preread(str(path), "--card", "rtx-3090", "--context", "4096", exit_code=1).output.splitlines()
    (line,) = (line for line in said if "preread models convert" in line)
    words = shlex.split(line)
    assert words[words.index("convert") + 1] == str(path)


def test_yarn_makes_the_context_longer(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read_model(write(tmp_path / "m", plain, rope_scaling=rope)).max_context == 131072


def test_a_gguf_is_planned_as_it_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    written = write_model(path)
    model = read_model(path)
    shape = model.shape
    vocab, n_parameters = len(written["token_embd.weight"]), sum(tensor.size for tensor in written.values())
    assert (shape.n_layers, shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.vocab) == (2, 2, 2, 32, vocab)
    assert (model.n_parameters, model.max_context, model.joined_params) == (n_parameters, 128, 10 * 64 * 64)
    assert model.weights_nbytes == pytest.approx(2 * model.n_parameters, rel=0.03)  # as the allocator rounds
    assert (model.stored_nbytes, model.problems) == (4 * n_parameters, ())
    assert "plain weights" in model.notes[0]
    assert "GGUF of" in preread(str(path), "--card", "t4", "--context", "100").output


def test_a_gguf_that_fits_as_plain_weights_is_not_told_to_be_converted(tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "llama-8b.Q4_K_M.gguf"))
    found = json.loads(preread(path, "--card", "rtx-3090", "--context", "4096", "--json").output)
    assert (found["model"]["weights"], found["model"]["bits_per_weight"]) == ("GGUF of 4.50 bits", 16)
    assert (found["settings"][0]["bits"], found["conversion"]) == (16, None)
    assert "models convert" not in preread(path, "--card", "rtx-3090", "--context", "4096").output
    smaller = preread(path, "--card", "t4", "--context", "4096", exit_code=1).output
    assert "after `preread models import`, preread models convert SOURCE --bits" in smaller


def test_a_part_of_a_gguf_is_no_model(tmp_path: Path) -> None:
    part = write_gguf(tmp_path / "big-00001-of-00003.gguf")
    assert "llama-gguf-split --merge" in preread(str(part), "--card", "h200", exit_code=1).output
    assert "one of several parts" in preread(str(tmp_path), "--card", "h200", exit_code=1).output
    with pytest.raises(SourceRefused, match="one of several parts"):
        read_model(write_gguf(tmp_path / "renamed.gguf", n_parts=3))


def test_which_of_several_ggufs_is_meant_is_not_guessed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.Q4_K_M.gguf")
    assert read_model(tmp_path).name == "m.Q4_K_M"
    write_gguf(tmp_path / "mmproj-m.gguf")
    said = preread(str(tmp_path), "--card", "h200", exit_code=1).output
    assert "several GGUF files" in said
    assert "m.Q4_K_M.gguf, mmproj-m.gguf" in said


def test_heads_that_no_kv_layout_has_are_refused(tmp_path: Path) -> None:
    phi = write(tmp_path / "phi", plain, model_type="phi", head_dim=80)
    said = preread(str(phi), "--card", "h200", exit_code=1).output
    assert "models of type phi are not supported" in said
    assert "its head dim 80 is not a multiple of 32" in said
    with pytest.raises(
        ArchitectureRefused, match=r"^m cannot be planned: this llama .*: its head dim 100 is not a multiple of 32$"
    ):
        read_model(write(tmp_path / "m", plain, head_dim=100))
    with pytest.raises(ArchitectureRefused, match="head dim 80"):
        read_model(write_gguf(tmp_path / "m.gguf", hidden=2560))


def test_a_model_of_other_bits_is_still_the_model_it_was(tmp_path: Path) -> None:
    other = write(tmp_path / "two", plain, model_type="gemma2")
    said = preread(str(other), "--bits", "4", "--card", "h200", exit_code=1).output
    assert "models of type gemma2 are not supported" in said
    assert said.startswith("two: ")
    assert preread(str(write(tmp_path / "m", plain)), "--bits", "4", "--card", "h200").output.startswith("m: ")


def test_what_only_the_torch_engine_computes_is_not_said_to_fit_a_card(tmp_path: Path) -> None:
    olmo = str(write(tmp_path / "olmo", plain, model_type="olmo2"))
    assert (
        "models of type olmo2 are not supported on the exl2 engine"
        in preread(olmo, "--card", "h200", exit_code=1).output
    )
    quantized = preread(olmo, "--card", "h200", "--bits", "4", exit_code=1).output
    assert "models of type olmo2 are not supported on the exl2 engine" in quantized
    assert "not supported" not in preread(olmo, "--card", "cpu", exit_code=1).output


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no model"):
        read_model(tmp_path / "none")
    with pytest.raises(SourceRefused, match=r"no config\.json"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SourceRefused, match="cannot be read as JSON"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(SourceRefused, match="no safetensors files"):
        read_model(tmp_path)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\x03")
    with pytest.raises(SourceRefused, match="cannot be read as a GGUF"):
        read_model(tmp_path / "bad.gguf")


def test_the_command_says_what_fits(tmp_path: Path) -> None:
    model = str(write(tmp_path / "m", exl2, {"quant_method": "exl2", "bits": 4.0}))
    found = json.loads(preread(model, "--card", "h200", "--context", "32768", "--json").stdout)
    assert found["fits"]
    assert found["problems"] == []
    assert found["kv_bytes_per_token"]["stored"] == 64 * 8 * 128 * (1 + 0.5 + 2 * 2 / 32)
    assert [bound["context"] for bound in found["bounds"]] == [0, 8192, 32768, 131072, 262144]
    assert sum(line["nbytes"] for line in found["ledger"]["lines"]) <= found["ledger"]["total_nbytes"]
    assert {tier["tier"] for tier in found["restore"]} == {"host", "disk", "redis", "object"}
    text = preread(model, "--card", "t4", exit_code=1).output
    assert "DOES NOT FIT" in text
    assert "missing before any document" in text
    assert "no Triton kernels below sm_80" in text


def test_what_no_memory_would_change_is_refused(tmp_path: Path) -> None:
    model = str(write(tmp_path / "m", exl2, {"quant_method": "exl2", "bits": 4.0}))
    assert "needs sm_70 or newer" in preread(model, "--card", "p40", exit_code=1).output
    assert "need an NVIDIA card" in preread(model, "--card", "cpu", exit_code=1).output
    assert "has to be windowed" in preread(model, "--card", "h200", "--context", "65536", exit_code=1).output
    windowed = preread(model, "--card", "h200", "--context", "65536", "--retention", "small")
    assert "512 rows of it in memory" in windowed.output
    other = write(tmp_path / "o", plain, model_type="mamba")
    assert "models of type mamba are not supported" in preread(str(other), "--card", "h200", exit_code=1).output


def test_dimensions_that_are_missing_are_named() -> None:
    assert "--kv-heads is missing" in preread("--layers", "40", exit_code=1).output
    sizes = ("--layers", "40", "--kv-heads", "4", "--head-dim", "128")
    assert "--weights-gb" in preread(*sizes, exit_code=1).output
    assert "multiple of 32" in preread(*sizes[:5], "100", "--weights-gb", "13", exit_code=1).output
    eight = preread(*sizes, "--params", "27", "--bits", "8", "--card", "v100-16", exit_code=1)
    assert "DOES NOT FIT" in eight.output


def test_the_engine_plans_the_same_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `preread plan` says of a card, and what the engine writes to its log there before it loads."""
    card, wanted = CARDS["h200"], Wanted(context=32_768, users=8)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (card.memory_nbytes - CONTEXT_NBYTES, card.memory_nbytes))
    directory = write(tmp_path / "m", exl2, {"quant_method": "exl2", "bits": 4.0})
    index = request.INDEX_NBYTES
    options = loading.Options(KVType.K8V4, wanted.n_slots, max_context=32_768, max_rows=8, index_nbytes=index)
    model: Any = SimpleNamespace(max_context=32_768, n_heads=40, head_dim=128)
    alone = loading.plan(directory, model, KVLayout(64, 8, 128, KVType.K8V4), options)
    assert plan_ledger(read_model(directory), card, replace(wanted, guesses=False)) == alone
    options = replace(options, draft_tokens=DRAFT_TOKENS)
    theirs = loading.plan(directory, model, KVLayout(64, 8, 128, KVType.K8V4), options)
    assert plan_ledger(read_model(directory), card, wanted) == theirs

    small = write(tmp_path / "small", exl2, {"quant_method": "exl2", "bits": 4.0})
    tall: Any = SimpleNamespace(**vars(model), kv_types={}, layout=lambda kv_type: KVLayout(64, 8, 128, kv_type))
    monkeypatch.setattr(loading_pair, "load_card", lambda _: tall)
    beside = loading_pair.draft_beside(small, replace(options, n_slots=wanted.draft_slots, index_nbytes=0))
    both = loading.plan(directory, model, KVLayout(64, 8, 128, KVType.K8V4), options, beside)
    assert plan_ledger(read_model(directory), card, replace(wanted, draft=read_model(small))) == both
    assert both.pool_blocks < theirs.pool_blocks / 2


def test_a_draft_model_is_planned_for(tmp_path: Path) -> None:
    model = str(write(tmp_path / "m", exl2, {"quant_method": "exl2", "bits": 4.0}))
    small = write(tmp_path / "small", exl2, {"quant_method": "exl2", "bits": 4.0})
    alone = json.loads(preread(model, "--card", "h200", "--json").output)
    both = json.loads(preread(model, "--card", "h200", "--draft-model", str(small), "--json").output)
    assert (alone["wanted"]["draft_model"], both["wanted"]["draft_model"]) == (None, "small")
    names = {line["name"] for line in both["ledger"]["lines"]} - {line["name"] for line in alone["ledger"]["lines"]}
    assert names == {f"draft model: {part}" for part in ("weights", "tails", "its steps", "documents")}
    assert both["ledger"]["document_tokens"] < alone["ledger"]["document_tokens"] / 2
    assert "draft model: small" in preread(model, "--card", "h200", "--draft-model", str(small)).output
    for directory, piece in ((tmp_path / "m", "a"), (small, "b")):
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {piece: 0}, "merges": []}}))
    refused = preread(model, "--card", "h200", "--draft-model", str(small), exit_code=1)
    assert "the draft model small: it has other tokens: token 0 is 'a' in the model, and 'b'" in refused.output
