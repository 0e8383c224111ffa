"""llama.cpp behind the `Runner` contract: stored KV means what it meant, sequences do not touch each other."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_store.layout import KVType
from service.engine.llama_engine.loading import Options, load_runner
from service.engine.llama_engine.runner import LlamaRunner
from service.engine.models.card import load_card
from service.engine.prompt import PromptTemplate
from service.engine.protocol import Rows
from service.engine.tokenizer import Tokenizer

TEXT = (
    "Row 1 of the ledger names the mill. " * 30
    + "The code of the vault is 7719. "
    + "Trains leave Porto at nine and at noon. " * 30
)
CHUNK = 256
CLOSE = 1e-3
CLOSE_F16 = 2.0
"""llama.cpp sums F16 values up in F16: the order of cells in its cache shows."""


@pytest.fixture(scope="module", params=list(KVType))
def runner(request: pytest.FixtureRequest, gguf_model: Path) -> Iterator[LlamaRunner]:
    threads = int(os.environ.get("OMP_NUM_THREADS") or 2)
    options = Options(request.param, n_slots=4, tail_tokens=512, documents_nbytes=160 << 20, threads=threads)
    made = load_runner(gguf_model, load_card(gguf_model), options)
    yield made
    made.close()


@pytest.fixture(scope="module")
def template(gguf_model: Path) -> PromptTemplate:
    return PromptTemplate(load_card(gguf_model).prompt, Tokenizer.load(gguf_model))


@pytest.fixture(scope="module")
def ids(template: PromptTemplate) -> list[int]:
    return template.document(TEXT).ids


@pytest.fixture(scope="module")
def built(runner: LlamaRunner, ids: list[int]):
    document, blocks = runner.new_document(len(ids)), []
    for first in range(0, len(ids), CHUNK):
        blocks += runner.prefill_chunk(document, ids[first : first + CHUNK])
    return document, blocks


def loaded(runner: LlamaRunner, blocks, n_tokens: int, capacity: int = 0):
    document = runner.new_document(capacity or n_tokens)
    for layer in range(runner.layout.n_layers):
        records = memoryview(b"".join(bytes(block[layer]) for block in blocks))
        runner.load_blocks(document, layer, 0, records, n_tokens)
    runner.finish_load(document, n_tokens)
    return document


def exact(runner: LlamaRunner) -> bool:
    return runner.layout.kv_type != KVType.FP16


def same(runner: LlamaRunner, found: torch.Tensor, expected: torch.Tensor) -> bool:
    if exact(runner):
        return torch.equal(found, expected)
    return bool((found - expected).abs().max() < CLOSE_F16)


def first_logits(runner: LlamaRunner, document, ids: list[int], question: list[int]) -> torch.Tensor:
    slot = runner.new_tail()
    (logits,) = runner.forward([Rows(slot, document, [ids[-1], *question], refeed=True)])
    runner.free_tail(slot)
    return logits


def test_a_loaded_document_gives_the_logits_of_the_computed_one(runner, built, ids, template):
    document, blocks = built
    question = template.question("What is the code of the vault?")
    again = loaded(runner, blocks, len(ids))
    assert same(runner, first_logits(runner, again, ids, question), first_logits(runner, document, ids, question))
    runner.free_document(again)


def test_kv_and_logits_do_not_depend_on_what_else_is_or_was_in_the_cache(runner, built, ids, template):
    """Documents and tails come and go between the steps of a build, below and above its cells."""
    document, blocks = built
    question = template.question("What is the code of the vault?")
    expected = first_logits(runner, document, ids, question)
    others, slots = [loaded(runner, blocks[:1], CHUNK) for _ in range(3)], []

    def meanwhile() -> None:
        slots.append(runner.new_tail())
        runner.forward([Rows(slots[-1], document, ids[: 10 * len(others) + 7])])
        if len(slots) > 2:
            runner.free_tail(slots.pop(0))
        if others:
            runner.free_document(others.pop(0))

    again, found = runner.new_document(len(ids)), []
    for first in range(0, len(ids), CHUNK):
        found += runner.prefill_chunk(again, ids[first : first + CHUNK], meanwhile)
    assert found == blocks or not exact(runner)
    runner.free_tail(slots.pop(0))
    assert same(runner, first_logits(runner, again, ids, question), expected)
    for slot in slots:
        runner.free_tail(slot)
    runner.free_document(again)


def test_a_build_taken_up_from_its_blocks_gives_the_same_bytes(runner, built, ids):
    _, blocks = built
    document = loaded(runner, blocks[:1], CHUNK, capacity=len(ids))
    rest = []
    for first in range(CHUNK, len(ids), CHUNK):
        rest += runner.prefill_chunk(document, ids[first : first + CHUNK])
    assert rest == blocks[1:] or not exact(runner)
    assert same(runner, first_logits(runner, document, ids, [5]), first_logits(runner, built[0], ids, [5]))
    runner.free_document(document)


def test_a_chunk_that_is_cancelled_leaves_the_document_as_it_was(runner, built, ids):
    _, blocks = built
    document = runner.new_document(len(ids))

    def stop() -> None:
        raise KeyError("cancelled")

    with pytest.raises(KeyError):
        runner.prefill_chunk(document, ids[:CHUNK], stop)
    again = runner.prefill_chunk(document, ids[:CHUNK])
    assert again == blocks[:1] or not exact(runner)
    assert document.n_tokens == CHUNK
    runner.free_document(document)


def test_turns_come_back_behind_another_copy_of_the_document(runner, built, ids, template):
    document, blocks = built
    kept, slot = runner.new_tail(), runner.new_tail()
    question = template.question("When do trains leave?")
    runner.forward([Rows(kept, document, [ids[-1], *question], refeed=True, logits_from=len(question))])
    records = runner.export_tail(kept, 0, len(question))
    other = loaded(runner, blocks, len(ids))
    runner.import_tail(slot, records, len(question))
    (expected,) = runner.forward([Rows(kept, document, question[:3])])
    (found,) = runner.forward([Rows(slot, other, question[:3])])
    assert same(runner, found, expected)
    assert runner.tail_length(slot) == len(question) + 3
    runner.truncate_tail(slot, len(question))
    assert runner.export_tail(slot, 0, len(question)) == records
    for each in (kept, slot):
        runner.free_tail(each)
    runner.free_document(other)


def test_an_idle_tail_goes_on_behind_the_next_copy_of_its_document(runner, built, ids):
    _, blocks = built
    gone = loaded(runner, blocks, len(ids))
    slot = runner.new_tail()
    runner.forward([Rows(slot, gone, [ids[-1], 5, 6, 7], refeed=True, logits_from=3)])
    (expected,) = runner.forward([Rows(slot, gone, [8])])
    runner.truncate_tail(slot, 3)
    runner.free_document(gone)
    back = loaded(runner, blocks, len(ids))
    (found,) = runner.forward([Rows(slot, back, [8])])
    assert same(runner, found, expected)
    runner.free_tail(slot)
    runner.free_document(back)


def test_sequences_of_one_step_do_not_see_each_other(runner, built, ids, template):
    document, _ = built
    questions = [template.question(text) for text in ("What is the code?", "Who is named in row 1 of the ledger?")]
    alone = [first_logits(runner, document, ids, question)[-1] for question in questions]
    slots = [runner.new_tail() for _ in questions]
    batch = [
        Rows(slot, document, [ids[-1], *question], refeed=True, logits_from=len(question))
        for slot, question in zip(slots, questions, strict=True)
    ]
    for found, expected in zip(runner.forward(batch), alone, strict=True):
        assert int(found[-1].argmax()) == int(expected.argmax())
        assert (found[-1] - expected).abs().max() < (CLOSE if exact(runner) else CLOSE_F16)
    for slot in slots:
        runner.free_tail(slot)


def test_rows_beyond_what_goes_through_at_once_are_computed_in_parts(runner, built, ids):
    document, _ = built
    slots, tokens = [runner.new_tail() for _ in range(2)], ids[20:320]
    together = runner.forward([Rows(slot, document, tokens, logits_from=200) for slot in slots])
    assert [len(logits) for logits in together] == [100, 100]
    assert (together[0] - together[1]).abs().max() < (CLOSE if exact(runner) else CLOSE_F16)
    for slot in slots:
        runner.free_tail(slot)


def test_a_step_that_is_refused_leaves_every_tail_as_it_was(runner, built, ids):
    document, _ = built
    good, bad = runner.new_tail(), runner.new_tail()
    runner.forward([Rows(good, document, [ids[-1], 5], refeed=True, logits_from=1)])
    (expected,) = runner.forward([Rows(good, document, [6])])
    runner.truncate_tail(good, 1)
    with pytest.raises(RuntimeError, match="does not compute"):
        runner.forward([Rows(good, document, [6]), Rows(bad, document, [ids[-1], 1 << 30], refeed=True)])
    (found,) = runner.forward([Rows(good, document, [6])])
    assert same(runner, found, expected)
    assert runner.usable()
    for slot in (good, bad):
        runner.free_tail(slot)


def test_freed_documents_leave_room_for_others(runner, built, ids):
    """Many times what the cache holds, while a tail of a freed one waits."""
    _, blocks = built
    slot = runner.new_tail()
    for _ in range(40):
        document = loaded(runner, blocks, len(ids))
        runner.truncate_tail(slot, 0)
        runner.forward([Rows(slot, document, [ids[-1], 5], refeed=True)])
        runner.free_document(document)
    runner.free_tail(slot)


def test_any_flipped_byte_changes_the_logits(runner, built, ids):
    document, blocks = built
    expected = first_logits(runner, document, ids, [5])[-1]
    damaged = [[bytearray(record) for record in block] for block in blocks]
    # The exponent of a half float: of a key or value, or of the scale of 32 of them.
    damaged[0][3][1] ^= 0x40
    other = loaded(runner, damaged, len(ids))
    found = first_logits(runner, other, ids, [5])[-1]
    runner.free_document(other)
    assert not np.array_equal(found.numpy(), expected.numpy())
