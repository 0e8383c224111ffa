"""What tests of several runners do with one."""

import numpy as np

from cache_store.rows import take_head_rows, take_rows
from service.engine.protocol import Rows


def log_probs(logits):
    return logits.double().log_softmax(-1)


def ask(runner, document, tokens, question):
    """Logits of the document's last token and of every token of a question, from a fresh tail."""
    slot = runner.new_tail()
    try:
        return runner.forward([Rows(slot, document, [tokens[-1], *question], refeed=True)])[0]
    finally:
        runner.free_tail(slot)


def load_layerwise(runner, blocks, n_tokens):
    """A document restored from encoded blocks, as a snapshot's reader gives them."""
    document = runner.new_document(n_tokens)
    for layer in range(runner.layout.n_layers):
        records = bytearray().join(block[layer] for block in blocks)
        runner.load_blocks(document, layer, 0, memoryview(records), n_tokens)
    runner.finish_load(document, n_tokens)
    return document


def resident_with_slots(runner, blocks, n_tokens, ends, places):
    """A document of the rows `ends` of one of `n_tokens` tokens, given by its encoded blocks, and of the slots
    ``places[layer][head]``, at the positions of the whole one."""
    layout = runner.layout
    dense, slots = [], []
    for layer, of_layer in enumerate(places):
        records = [block[layer] for block in blocks]
        dense.append(take_rows(records, n_tokens, layout, np.array(ends)))
        own = [take_head_rows(records, n_tokens, layout, head, np.array(rows)) for head, rows in enumerate(of_layer)]
        slots.append(memoryview(bytearray().join(record for of_head in own for record in of_head)))
    resident = load_layerwise(runner, list(zip(*dense, strict=True)), len(ends))
    runner.new_slots(resident, [[len(rows) for rows in of_layer] for of_layer in places])
    for layer, records in enumerate(slots):
        runner.load_slots(resident, layer, records)
    runner.finish_load(resident, len(ends), next_position=n_tokens, last_position=n_tokens - 1)
    return resident
