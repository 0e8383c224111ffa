"""The benchmarks of a card on a tiny model without one: their logic, not their figures."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import (
    gpu_decode,
    gpu_draft,
    gpu_failures,
    gpu_parity,
    gpu_prefill,
    gpu_restore,
    gpu_resume,
    gpu_service,
    gpu_speculation,
    gpu_windowed,
)
from benchmarks.gpu_documents import random_records
from benchmarks.gpu_engine import Engine
from benchmarks.gpu_lib import Result
from benchmarks.gpu_models import Want, opened, tiny_model
from cache_store.codec import decode_records, encode_records
from cache_store.layout import KVLayout, KVType
from service.engine.protocol import Rows
from tests.service.engine.draft_pair import make_guesses_free


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("bench")
    tiny_model(directory)
    return directory


@pytest.fixture
def arguments(work, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_decode, "USERS", (1, 3))
    monkeypatch.setattr(gpu_decode, "STEPS", 3)
    monkeypatch.setattr(gpu_decode, "WARM_UP", 1)
    found = argparse.Namespace(out=str(tmp_path), limit_s=100.0, dry=True, work=str(work), stock=False, build=True)
    found.kv_types = found.kv_type = "k8v4"
    found.contexts, found.tokens, found.stream_tokens = "64,300", 1024, 512
    return found


def rows(arguments, part: str) -> dict[str, dict]:
    """What -> row; a row that failed fails the test."""
    found = json.loads((Path(arguments.out) / f"{part}.json").read_text())["rows"]
    failed = [f"{row['what']}: {row['figure']}" for row in found if row["figure"].startswith("failed")]
    assert not failed
    return {row["what"]: row for row in found}


@pytest.mark.parametrize("kv_type", list(KVType))
def test_random_records_are_what_encoding_gives(kv_type):
    layout = KVLayout(2, 2, 64, kv_type)
    n = 600
    records = random_records(layout, n)
    assert len(records) == sum(layout.record_nbytes(length) for length in layout.block_lengths(n))
    k, v = torch.empty(2, 2, n, 64)
    decode_records(records, n, layout, out_k=k, out_v=v)
    assert torch.isfinite(k).all()
    assert torch.isfinite(v).all()
    assert k.std() > 0.05
    assert len(b"".join(encode_records(k, v, layout))) == len(records)


def test_decode(arguments, work):
    result = Result("decode", "s.py", arguments)
    gpu_decode.measure(result, arguments, work / "tiny")
    found = rows(arguments, "decode")
    assert "k8v4, 300 tokens, 3 users of one document" in found
    assert "k8v4, 300 tokens, 1 user: attention alone" in found
    assert "k8v4, 300 tokens, 3 users of one document, through host and scheduler" in found


def test_prefill(arguments, work):
    result = Result("prefill", "s.py", arguments)
    with opened(work / "tiny", Want(KVType.K8V4, 2, 64, 4096, chunk_tokens=256)) as open_:
        gpu_prefill.measure(result, open_.runner, work / "tiny", 1024, 1e9)
    found = rows(arguments, "prefill")
    assert found["prefill of 1K, average"]["spread"] == "one run of the whole"
    assert "cost of exporting the blocks, prefill of 512 tokens" in found


def test_restore(arguments, tmp_path):
    arguments.tokens, arguments.disk_tokens, arguments.readers = 1400, 700, "1,3"
    arguments.work, arguments.memory = str(tmp_path), str(tmp_path / "memory")
    measure = gpu_restore.Measure(Result("restore", "s.py", arguments), arguments, KVType.K8V4, 1e9)
    measure.in_memory()
    measure.on_disk()
    found = rows(arguments, "restore")
    assert "k8v4, 1400 tokens: restore from the page cache, 3 readers" in found
    assert "k8v4, 1400 tokens: from host memory to the card" in found
    assert found["k8v4, 700 tokens: restore from the disk"]["target"].startswith("at least")


def test_resume(arguments, work):
    result = Result("resume", "s.py", arguments)
    gpu_resume.measure(result, arguments, work / "tiny", KVType.K8V4, by_prefill=True)
    found = rows(arguments, "resume")
    assert "k8v4, 1K: restore from disk" in found


def test_service(arguments, work):
    result = Result("service", "s.py", arguments)
    with opened(work / "tiny", Want(KVType.K8V4, 4, 600, 8192, chunk_tokens=256)) as open_:
        engine = Engine(open_.runner, Path(arguments.out) / "store", budget_nbytes=1 << 40)
        try:
            gpu_service.measure(result, engine, arguments, [2], 500)
        finally:
            engine.close()
    found = list(rows(arguments, "service").values())
    assert len(found) == 3
    assert "p99" in found[1]["figure"]


def test_speculation(arguments, work, monkeypatch):
    for name in ("STEPS", "WARM_UP", "TURNS"):
        monkeypatch.setattr(gpu_speculation, name, 1)
    arguments.tokens = 24
    result = Result("speculation", "s.py", arguments)
    gpu_speculation.measure(result, arguments, work / "tiny")
    found = rows(arguments, "speculation")
    assert found["k8v4, 300 tokens, rows of one step against the same one by one"]["met"]
    assert "k8v4, 300 tokens, a step of 8 rows of one sequence" in found
    assert "k8v4, 300 tokens, nothing matches" in found
    # The first token comes with the prompt: 23 are left, of 8, 8 and 7 a step; in turn of 8, 3, 6, 1 and 5.
    assert result.raw["k8v4 64 tokens, 7 guesses, all right"][1] == pytest.approx(23 / 3)
    assert result.raw["k8v4 64 tokens, 3 guesses, all right"][1] == pytest.approx(23 / 6)
    assert result.raw["k8v4 64 tokens, 7 guesses, 7, 2, 5 and 0 right in turn"][1] == pytest.approx(23 / 5)
    assert result.raw["k8v4 64 tokens, a quotation, guesses looked up and planned as served"][1] >= 1


def test_draft(arguments, work, monkeypatch):
    for name in ("STEPS", "WARM_UP", "TURNS"):
        monkeypatch.setattr(gpu_draft, name, 1)
    monkeypatch.setattr(gpu_draft, "RIGHT", (0.9, 0.0))
    monkeypatch.setattr(gpu_draft, "copy_ceiling", lambda: 1e9)
    make_guesses_free(monkeypatch)
    arguments.tokens, arguments.contexts = 16, "300"
    result = Result("draft", "s.py", arguments)
    gpu_draft.measure(result, arguments, work / "tiny", work / "tiny")
    found = rows(arguments, "draft")
    assert "k8v4, 300 tokens, a step of the draft model" in found
    assert "k8v4, 300 tokens, without a draft model" in found
    assert len(found) == 2 + 2
    well, badly = (result.raw[f"k8v4, 300 tokens, guesses of the draft model right {n}% of the time"] for n in (90, 0))
    assert well[1] > 3
    assert badly[1] == 1


def test_a_told_draft_model_is_right_as_often_as_it_shall_be():
    class Silent:
        def forward(self, batch):
            return [torch.zeros(len(each.tokens) - each.logits_from, 200) for each in batch]

    script = [70, 90, 110, 64]
    telling = gpu_draft.Telling(Silent(), script, [True, False, True, True])
    (first,) = telling.forward([Rows(0, None, gpu_draft.PROMPT, logits_from=len(gpu_draft.PROMPT) - 1)])
    (rest,) = telling.forward([Rows(0, None, [70, 91, 90, 110, 64])])
    assert first.argmax(1).tolist() == [70]
    assert rest.argmax(1).tolist() == [91, 110, 110, 64, 0]


def test_windowed(arguments, work, tmp_path):
    result = Result("windowed", "s.py", arguments)
    sizes = gpu_windowed.Sizes(document=4096, short=1024, segment=1024)
    with opened(work / "tiny", Want(KVType.K8V4, 4, 512, 4096, chunk_tokens=512)) as open_:
        gpu_windowed.measure(result, open_.runner, sizes, tmp_path)
    found = rows(arguments, "windowed")
    assert [row["met"] for row in list(found.values())[:7]] == [True] * 7
    assert "decode, document of 4K, 256 rows resident, 256 fetched" in found
    assert any(name.startswith("decode, document of 4K, 768 rows and 256 fetched, 31 slots a head") for name in found)
    assert "question of 30 tokens to its first token, document of 4K" in found
    assert "through the engine: question to its first token, document of 2K" in found
    assert found["replay of 4K in segments of 1K behind 256 sinks"]["target"] == "at most 2 times"
    assert "compaction of 4K: replay, then rows chosen, 0 a head on average" in found


def test_failures(arguments, work, monkeypatch):
    monkeypatch.setattr(gpu_failures, "N_CYCLED", 30)
    result = Result("failures", "s.py", arguments)
    gpu_failures.measure(result, arguments, with_fault=False)
    found = rows(arguments, "failures")
    assert len(found) == 5
    assert all(row["met"] for row in found.values())


def test_parity_finds_what_is_planted(arguments, work):
    result = Result("parity", "s.py", arguments)
    parity = gpu_parity.Parity(result, work / "tiny", arguments)
    parity.found["torch"] = gpu_parity.torch_reference(work / "tiny", parity.ids, parity.n_document, parity.chunk)
    parity.measure(KVType.FP16)
    parity.compare(*gpu_parity.COMPUTE, gpu_parity.COMPUTE_LIMIT)
    parity.compare(*gpu_parity.STORED, gpu_parity.EXACT_LIMIT)
    parity.planted()
    found = rows(arguments, "parity")
    assert len(found) == 3
    assert all(row["met"] for row in found.values())
