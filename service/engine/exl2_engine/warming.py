"""Everything once before the first request: kernels are compiled or loaded and libraries make their plans on first use,
which takes up to seconds, and no stream should wait for it."""

import logging
import time

import torch

from service.engine.exl2_engine.model import DecoderModel
from service.engine.exl2_engine.pool import Document
from service.engine.exl2_engine.runner import Exl2Runner
from service.engine.fetch.index import KeyIndex
from service.engine.protocol import Rows

log = logging.getLogger(__name__)

ROWS = (1, 3, 16, 32, 60, 250, 256)
"""Kernels are compiled apart for one row, for multiples of 16 and for other numbers, and for tiles of several sizes."""

INDEX_TOKENS = 1000
"""Of an index that is scored. Not whole spans: so that every kernel of it is loaded."""


def warm_up(runner: Exl2Runner, model: DecoderModel) -> None:
    """Read a document of anything, ask about it in questions of many lengths, store a turn and load it again, repeat
    the document.

    Uses what memory for documents and tails there is and gives it back.
    """
    started = time.perf_counter()
    layout, limits = runner.layout, runner.limits
    n_tokens = min(limits.chunk_tokens + 1, limits.max_context - 1, runner.pool.n_free * layout.block_tokens)
    prefill = getattr(runner.backend, "prefill_attention", None)
    if prefill is not None:
        prefill.warm_up(model.n_heads, limits.chunk_tokens, model.device, model.dtype)
    tokens = [i % limits.vocab_size for i in range(max(n_tokens, *ROWS))]
    document, slot = runner.new_document(n_tokens), runner.new_tail()
    try:
        for first in range(0, n_tokens, limits.chunk_tokens):
            runner.prefill_chunk(document, tokens[first : min(first + limits.chunk_tokens, n_tokens)])
        for shared in (document, None):
            _ask(runner, slot, shared, tokens)
        blocks = runner.export_tail(slot, 0, 1)
        runner.truncate_tail(slot, 0)
        runner.import_tail(slot, blocks, 1, fetched=True)
        runner.drop_fetched(slot)
        queries = runner.question_queries(Rows(slot, document, tokens[: min(ROWS[2], limits.tail_tokens)]), [(0, 0)])
        index = KeyIndex(layout, INDEX_TOKENS, [(0, 0)])
        index.move_to(model.device)
        index.scores(queries, [(0, 1)])
        runner.replay(document, tokens[: limits.chunk_tokens], 0, 0, n_tokens)
        if runner.pool.n_free:
            runner.new_slots(document, [[1] * layout.n_kv_heads] * layout.n_layers)
            _ask(runner, slot, document, tokens)
    finally:
        runner.free_tail(slot)
        runner.free_document(document)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    log.info("warmed up in %.1f s", time.perf_counter() - started)


def _ask(runner: Exl2Runner, slot: int, document: Document | None, tokens: list[int]) -> None:
    """Questions of many lengths."""
    for n_rows in ROWS:
        n = min(n_rows, runner.limits.tail_tokens)
        runner.truncate_tail(slot, 0)
        runner.forward([Rows(slot, document, tokens[:n], logits_from=n - 1)])
