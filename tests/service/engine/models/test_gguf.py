from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from service.engine.models.errors import SourceRefused
from service.engine.models.gguf import is_gguf, read_gguf
from service.engine.models.source import silent

HIDDEN, HEADS, FEED, LAYERS = 64, 2, 64, 2


def write_model(
    path: Path, alignment: int = 0, arch: str = "llama", changes: Mapping[str, Any] | None = None, **tensors: np.ndarray
) -> dict[str, np.ndarray]:
    """A Llama of two layers with a vocabulary of bytes; its tensors by GGUF's names. `alignment` of their beginnings
    where it is not the usual one. `changes`: `gguf.GGUFValue` by key, None where it is left out. `tensors`: in the
    place of its own."""
    letters = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
    tokens = ["<|begin|>", "<|end|>", *letters, "ab"]
    writer = gguf.GGUFWriter(path, arch)
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for key, value in (changes or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.kv_data[0][key] = value
    tensors = tensors or random_tensors(len(tokens))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def random_tensors(vocabulary: int) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary, HIDDEN),
        "output.weight": (vocabulary, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        of_layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN), "attn_v": (HIDDEN, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (FEED, HIDDEN), "ffn_up": (FEED, HIDDEN), "ffn_down": (HIDDEN, FEED),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    draw = np.random.default_rng(7)
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were parsed."""
    files: list[str] = []

    class Counting(gguf.GGUFReader):
        def __init__(self, path: str, *arguments: object) -> None:
            files.append(str(path))
            super().__init__(path, *arguments)

    monkeypatch.setattr(gguf, "GGUFReader", Counting)
    return files


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny-00001-of-00002.gguf")
    with pytest.raises(SourceRefused, match="one of several parts"):
        read_gguf(tmp_path / "tiny-00001-of-00002.gguf", silent)


def test_a_gguf_is_parsed_once_and_its_tensors_are_what_was_written(tmp_path: Path, parsed: list[str]) -> None:
    written = write_model(tmp_path / "tiny.gguf")
    assert is_gguf(tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader
    source = read_gguf(tmp_path / "tiny.gguf", silent)
    assert parsed == [str(tmp_path / "tiny.gguf")]
    assert gguf.GGUFReader is reader
    assert source.config.num_hidden_layers == LAYERS
    assert np.array_equal(source.tensors["model.embed_tokens.weight"].numpy(), written["token_embd.weight"])
    down = source.tensors["model.layers.1.mlp.down_proj.weight"].numpy()
    assert np.array_equal(down, written["blk.1.ffn_down.weight"])
    assert source.tokenizer.convert_tokens_to_ids("<|end|>") == 1


def test_two_files_of_one_name_are_two_models(tmp_path: Path, parsed: list[str]) -> None:
    write_model(tmp_path / "tiny.gguf")
    read_gguf(tmp_path / "tiny.gguf", silent)
    (tmp_path / "tiny.gguf").unlink()
    write_model(tmp_path / "tiny.gguf")
    read_gguf(tmp_path / "tiny.gguf", silent)
    assert len(parsed) == 2
