"""What tests of several runners do with one."""

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
