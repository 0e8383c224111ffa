"""What windowed documents need of a runner, compared on the device at hand with what it must equal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_lib import Result, Row
from cache_store.rows import take_head_rows, take_rows
from service.engine.exl2_engine.projections import rotated_qkv
from service.engine.exl2_engine.runner import Exl2Runner
from service.engine.protocol import Rows

BLOCK = 256
QUESTION = [(7 + i * 11) % 250 for i in range(20)]
KL_LIMIT = 1e-3
PROBABILITY_LIMIT = 0.01


def check_all(result: Result, runner: Any) -> None:
    """One row for each comparison, in a small document."""
    result.attempt("segments", lambda: check_segments(result, runner))
    result.attempt("fetched rows", lambda: check_fetched(result, runner))
    result.attempt("slots", lambda: check_slots(result, runner))
    result.attempt("queries", lambda: check_queries(result, runner))
    result.attempt("replay", lambda: check_replay(result, runner))


def text(n: int, seed: int = 0) -> list[int]:
    return [(seed * 101 + 3 + i * i * 7 + i * 13) % 250 for i in range(n)]


@contextmanager
def document(runner: Exl2Runner, n_tokens: int) -> Iterator[Any]:
    made = runner.new_document(n_tokens)
    try:
        yield made
    finally:
        runner.free_document(made)


def read(runner: Exl2Runner, into: Any, tokens: list[int]) -> list[list[memoryview]]:
    chunk, blocks = runner.limits.chunk_tokens, []
    for at in range(0, len(tokens), chunk):
        blocks += runner.prefill_chunk(into, tokens[at : at + chunk])
    return blocks


def check_segments(result: Result, runner: Exl2Runner) -> None:
    """A segment's bytes, with another segment or none before it, and as they are loaded."""
    found, blocks = [], []
    with document(runner, BLOCK + 600) as one:
        read(runner, one, text(600))
        for seed in (1, 2, 1):
            runner.keep_prefix(one, BLOCK)
            blocks = read(runner, one, text(600, seed))
            found.append([bytes(record) for block in blocks for record in block])
        computed = [pool[one.blocks.long()].clone() for pool in runner.pool.layers]
        loaded = [behind_sinks(runner, one, blocks, computed) for _ in range(5)]
    add_same(result, "a segment again, another one between", found[0] == found[2] != found[1])
    add_same(result, "a segment loaded behind the sinks and computed there", all(loaded))


def behind_sinks(runner: Exl2Runner, one: Any, blocks: list[list[memoryview]], computed: list[Tensor]) -> bool:
    """Whether a segment's records, loaded behind the sinks that are kept, are the blocks as they were computed."""
    lengths = runner.layout.block_lengths(600)
    runner.keep_prefix(one, BLOCK)
    for layer in range(runner.layout.n_layers):
        for i, (block, length) in enumerate(zip(blocks, lengths, strict=True)):
            runner.load_blocks(one, layer, BLOCK * (1 + i), block[layer], length)
    runner.finish_load(one, BLOCK + 600)
    return all(
        torch.equal(pool[one.blocks.long()], old) for pool, old in zip(runner.pool.layers, computed, strict=True)
    )


def add_same(result: Result, what: str, same: bool) -> None:
    figure = "the same bytes" if same else "other bytes"
    result.add(Row(what, figure, target="the same bytes", met=same, must=True))


def check_fetched(result: Result, runner: Exl2Runner) -> None:
    """Answers of a whole document, and of its beginning with the end fetched."""
    tokens, n_kept = text(2 * BLOCK + 90), 2 * BLOCK
    slot = runner.new_tail()
    try:
        with document(runner, len(tokens)) as whole:
            blocks = read(runner, whole, tokens)
            expected = runner.forward([Rows(slot, whole, QUESTION)])[0]
            runner.truncate_tail(slot, 0)
            runner.finish_load(whole, n_kept, next_position=len(tokens), last_position=n_kept - 1)
            runner.import_tail(slot, blocks[2:], len(tokens) - n_kept, fetched=True)
            got = runner.forward([Rows(slot, whole, QUESTION)])[0]
    finally:
        runner.free_tail(slot)
    p, q = (x.double().log_softmax(-1) for x in (expected, got))
    worst = float((p.exp() * (p - q)).sum(-1).max())
    what, figure = "answers from a document's beginning and its end fetched", f"KL {worst:.1e} to the whole document's"
    result.add(Row(what, figure, target=f"under {KL_LIMIT:g}", met=worst < KL_LIMIT, must=True))


def check_slots(result: Result, runner: Exl2Runner) -> None:
    """Answers of a whole document, and of its ends with all rows between them as slots: of many rows and of a few,
    which go through graphs of their own."""
    tokens, n, ends = text(3 * BLOCK + 90), 3 * BLOCK + 90, [*range(BLOCK), *range(3 * BLOCK, 3 * BLOCK + 90)]
    places = np.arange(BLOCK, 3 * BLOCK)
    layout, slot, found = runner.layout, runner.new_tail(), []
    try:
        with document(runner, n) as whole, document(runner, len(ends)) as kept:
            blocks = read(runner, whole, tokens)
            runner.new_slots(kept, [[len(places)] * layout.n_kv_heads] * layout.n_layers)
            for layer in range(layout.n_layers):
                records = [block[layer] for block in blocks]
                rows = take_rows(records, n, layout, np.array(ends))
                runner.load_blocks(kept, layer, 0, memoryview(bytearray().join(rows)), len(ends))
                own = [take_head_rows(records, n, layout, head, places) for head in range(layout.n_kv_heads)]
                runner.load_slots(kept, layer, memoryview(bytearray().join(r for of_head in own for r in of_head)))
            runner.finish_load(kept, len(ends), next_position=n, last_position=n - 1)
            for one in (whole, kept):
                logits = [runner.forward([Rows(slot, one, QUESTION)])[0]]
                logits += [runner.forward([Rows(slot, one, [token])])[0] for token in QUESTION[:3]]
                found.append(torch.cat(logits))
                runner.truncate_tail(slot, 0)
    finally:
        runner.free_tail(slot)
    p, q = (x.double().log_softmax(-1) for x in found)
    worst = float((p.exp() * (p - q)).sum(-1).max())
    what, figure = "answers from a document's ends and slots of all between", f"KL {worst:.1e} to the whole document's"
    result.add(Row(what, figure, target=f"under {KL_LIMIT:g}", met=worst < KL_LIMIT, must=True))


def check_queries(result: Result, runner: Exl2Runner) -> None:
    """Queries of index heads, and those that a forward's attention was asked with; those of the first layer also as
    documents' keys are transformed."""
    model, attend, seen = runner._model, runner.backend.attend, []
    heads = [(0, 0), (model.n_layers // 2, 1 % model.n_kv_heads), (model.n_layers - 1, 0)]

    def record(step: Any, q: Tensor, *rest: Any, **more: Any) -> Tensor:
        seen.append(q.clone())
        return attend(step, q, *rest, **more)

    slot = runner.new_tail()
    try:
        with document(runner, 300) as one:
            read(runner, one, text(300))
            queries = runner.question_queries(Rows(slot, one, QUESTION), heads)
            runner.backend.attend = record  # type: ignore[method-assign]
            runner.forward([Rows(slot, one, QUESTION)])
    finally:
        runner.backend.attend = attend  # type: ignore[method-assign]
        runner.free_tail(slot)
    expected = [seen[layer].unflatten(1, (model.n_kv_heads, -1))[:, head].transpose(0, 1) for layer, head in heads]
    add_apart(result, "queries of index heads and of a forward", queries, torch.stack(expected) * model.scale)
    ids, places = (torch.tensor(x, dtype=torch.int32, device=model.device) for x in (QUESTION, range(300, 320)))
    with torch.inference_mode():
        q, _, _ = rotated_qkv(model, runner.backend, 0, model.embed(ids), places)
    first = q.unflatten(1, (model.n_kv_heads, -1))[:, 0].transpose(0, 1) * model.scale
    add_apart(result, "queries of index heads in the space of keys", queries[0], first)


def add_apart(result: Result, what: str, got: Tensor, expected: Tensor) -> None:
    got, expected = got.float().cpu(), expected.float().cpu()
    error = float((got - expected).abs().max() / got.abs().max())
    figure = f"{error:.1e} apart, relative to the largest"
    result.add(Row(what, figure, target="under 1e-2", met=error < 1e-2, must=True))


def check_replay(result: Result, runner: Exl2Runner) -> None:
    """Scores of a repetition, and probabilities in FP64 from what attention was given in each layer."""
    attention = runner.backend.prefill_attention
    over, exact = attention.over, []

    def record(q: Tensor, k: Tensor, v: Tensor, before: Any, scale: float) -> tuple[Tensor, Tensor]:
        exact.append(largest_probabilities(q, k, before[0][0], scale))
        return over(q, k, v, before, scale)

    n, first, last = 700, 300, 650
    try:
        with document(runner, n) as one:
            read(runner, one, text(n))
            attention.over = record  # type: ignore[method-assign]
            scores = runner.replay(one, [*QUESTION, *text(n)[first:last]], BLOCK, first, last)
    finally:
        attention.over = over  # type: ignore[method-assign]
    expected = torch.stack([p[:, BLOCK:] for p in exact])
    error = (scores - expected).abs()
    worst = float((error / expected.clamp(min=1e-3)).max())
    figure = f"at most {worst:.1%} off, or {worst * 1e-3:.0e}"
    what, target = "scores of a replay and probabilities in FP64", f"under {PROBABILITY_LIMIT:.0%}"
    result.add(Row(what, figure, target=target, met=worst < PROBABILITY_LIMIT, must=True))


def largest_probabilities(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    """FP32 ``[n_kv_heads, tokens]`` on the CPU: of the seen keys ``[n_kv_heads, tokens, d]`` for rows ``[n, heads, d]``
    that also see themselves, causally."""
    found = []
    for head, keys in enumerate(seen):
        queries = q.unflatten(1, (len(seen), -1))[:, head].transpose(0, 1).double()
        scores = queries @ torch.cat((keys, k[:, head])).double().T * scale
        hidden = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        scores[..., len(keys) :].masked_fill_(hidden, -torch.inf)
        found.append(scores.softmax(-1)[..., : len(keys)].amax((0, 1)))
    return torch.stack(found).float().cpu()
