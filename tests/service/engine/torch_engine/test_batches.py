"""Whatever else is in a batch, and however many documents: each sequence gets what it gets alone."""

from random import Random

import pytest
import torch

from cache_store.layout import KVType
from service.engine.protocol import Rows
from service.engine.torch_engine.runner import TorchRunner

LENGTHS = (150, 260, 40)


def rows_of(chance: Random, slot: int, document, text: list[int], past: int) -> Rows:
    """A step of decoding, more of a question, or a session's first question behind the document's last token."""
    own = [chance.randrange(3, 384) for _ in range(chance.choice((1, 1, 1, 3, 9)))]
    first = past == 0 and chance.random() < 0.5
    return Rows(slot, document, [text[-1], *own] if first else own, refeed=first)


@pytest.fixture
def runner(load_runner) -> TorchRunner:
    return load_runner(KVType.K8V4)


@pytest.mark.parametrize("seed", range(12))
def test_a_batch_gives_each_sequence_what_it_gets_alone(runner, token_ids, prefill, seed: int) -> None:
    chance = Random(seed)
    texts = [token_ids(n, seed=30 + n) for n in LENGTHS]
    documents = [prefill(runner, text)[0] for text in texts]
    slots = [(runner.new_tail(), runner.new_tail()) for _ in range(3)]
    places = [chance.randrange(len(texts)) for _ in slots]
    try:
        for _ in range(4):
            chosen = chance.sample(range(len(slots)), chance.randrange(2, len(slots) + 1))
            batch = [
                rows_of(chance, slots[i][0], documents[places[i]], texts[places[i]], runner.tail_length(slots[i][0]))
                for i in chosen
            ]
            together = runner.forward(batch)
            for i, rows, logits in zip(chosen, batch, together, strict=True):
                alone = Rows(slots[i][1], rows.document, rows.tokens, refeed=rows.refeed)
                torch.testing.assert_close(logits, runner.forward([alone])[0], rtol=0, atol=2e-4)
    finally:
        for slot in (slot for pair in slots for slot in pair):
            runner.free_tail(slot)
        for document in documents:
            runner.free_document(document)
