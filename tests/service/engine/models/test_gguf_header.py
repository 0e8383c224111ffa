"""The walk over a GGUF's header: what it finds, how long it takes, and that no damage gets past it as another error."""

import random
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from service.engine.models.errors import ModelError, SourceRefused
from service.engine.models.gguf_header import open_gguf, read_header
from service.engine.models.importer import import_model
from service.planning.gguf import read_gguf_facts
from tests.service.engine.models.damaged_gguf import BYTES
from tests.service.engine.models.test_gguf import write_model

SECONDS = 5.0
N_DAMAGES, N_IMPORTS = 400, 40


@pytest.mark.parametrize("alignment", [0, 256])
def test_what_is_walked_is_what_the_reader_finds(tmp_path: Path, alignment: int) -> None:
    write_model(tmp_path / "m.gguf", alignment)
    header, reader = read_header(tmp_path / "m.gguf"), open_gguf(tmp_path / "m.gguf")
    assert header.fields.keys() == {key for key in reader.fields if not key.startswith("GGUF.")}
    assert header.fields["tokenizer.ggml.token_type"] == reader.fields["tokenizer.ggml.token_type"].contents()
    assert header.number("llama.block_count") == reader.fields["llama.block_count"].contents()
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for found, tensor in zip(header.tensors.values(), reader.tensors, strict=True):
        assert (found.first, found.nbytes, found.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert (found.shape, found.n_elements) == (tuple(reversed(tensor.shape)), tensor.n_elements)


@pytest.mark.parametrize("damage", BYTES)
def test_no_reader_sees_what_cannot_be(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(BYTES[damage][0])
    monkeypatch.setattr("service.engine.models.gguf_header.GGUFReader", lambda _: pytest.fail("it was opened"))
    with pytest.raises(SourceRefused):
        open_gguf(tmp_path / "m.gguf")


def test_files_that_are_empty_or_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(SourceRefused, match="it is empty"):
        read_header(tmp_path / "empty.gguf")
    with pytest.raises(SourceRefused, match="No such file"):
        read_header(tmp_path / "none.gguf")


def test_a_large_vocabulary_takes_no_time(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list([b"token"] * 150_000)
    writer.add_token_merges(["to ken"] * 150_000)
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    began = time.perf_counter()
    assert read_header(tmp_path / "m.gguf").fields["tokenizer.ggml.tokens"].n == 150_000
    assert time.perf_counter() - began < 2


def test_whatever_byte_is_wrong_it_is_an_error_of_models_or_none(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    healthy = (tmp_path / "m.gguf").read_bytes()
    n_header = min(tensor.first for tensor in read_header(tmp_path / "m.gguf").tensors.values())
    draw, file, n_imports = random.Random(11), tmp_path / "damaged.gguf", 0
    for _ in range(N_DAMAGES):
        content = bytearray(healthy)
        for _ in range(draw.randint(1, 3)):
            content[draw.randrange(4, n_header)] = draw.choice((0, 1, 9, 127, 255, draw.randrange(256)))
        file.write_bytes(content[: draw.randrange(len(content))] if draw.random() < 0.2 else content)
        began = time.perf_counter()
        if is_planned(file) and n_imports < N_IMPORTS:
            n_imports += 1
            is_imported(file, tmp_path)
        assert time.perf_counter() - began < SECONDS
    assert n_imports == N_IMPORTS


def is_planned(file: Path) -> bool:
    try:
        return not read_gguf_facts(file).problems
    except ModelError:
        return False


def is_imported(file: Path, tmp_path: Path) -> None:
    for engine in (None, "llamacpp"):
        try:
            import_model(
                file, name="m", models_dir=tmp_path / "models", engine=engine, replace=True,
                measure=lambda *_: {}, find_heads=lambda *_: None,
            )  # fmt: skip
        except ModelError:
            continue
