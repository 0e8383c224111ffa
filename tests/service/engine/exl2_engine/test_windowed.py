"""What windowed documents need of the card's runner, on a CPU in FP32, held against plain arithmetic.

Segments behind kept tokens, rows at positions of their own, fetched rows in a tail, queries of index heads, scores of a
repetition.
"""

import pytest
import torch

from cache_store.codec import decode_records
from cache_store.layout import KVType
from service.engine.exl2_engine import replay
from service.engine.exl2_engine.projections import rotated_qkv
from service.engine.protocol import Rows
from tests.service.engine.runner_parts import ask, load_layerwise

SINKS = 256
QUANTIZED = [KVType.FP16, KVType.K8V4]


def as_bytes(blocks):
    return [bytes(record) for block in blocks for record in block]


def decoded(runner, blocks, n_tokens):
    """Keys and values FP32 ``[n_layers, n_kv_heads, n_tokens, head_dim]`` of encoded blocks, as attention has them."""
    layout = runner.layout
    shape = (layout.n_layers, layout.n_kv_heads, n_tokens, layout.head_dim)
    k, v = torch.empty(shape), torch.empty(shape)
    for layer in range(layout.n_layers):
        records = bytearray().join(block[layer] for block in blocks)
        rotated = layout.kv_type is not KVType.FP16
        data = torch.frombuffer(records, dtype=torch.uint8)
        decode_records(data, n_tokens, layout, out_k=k[layer], out_v=v[layer], rotated=rotated)
    return k, v


def exact_pass(runner, tokens, positions, seen_k, seen_v):
    """Rows over ``[n_layers, heads, seen, dim]`` and causally over themselves: per layer queries scaled and by KV head
    ``[kv_heads, group, n, dim]``, and the probabilities of the seen tokens ``[kv_heads, group, n, seen]``."""
    model, backend, found = runner._model, runner.backend, []
    x = model.embed(torch.tensor(tokens, dtype=torch.int32))
    hidden = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    for layer in range(model.n_layers):
        q, k, v = rotated_qkv(model, backend, layer, x, torch.tensor(positions, dtype=torch.int32))
        queries = q.unflatten(1, (model.n_kv_heads, -1)).permute(1, 2, 0, 3) * model.scale
        all_k, all_v = (torch.cat((s, o.transpose(0, 1)), 1) for s, o in ((seen_k[layer], k), (seen_v[layer], v)))
        scores = queries @ all_k[:, None].transpose(2, 3)
        scores[..., seen_k.shape[2] :].masked_fill_(hidden, -torch.inf)
        p = scores.softmax(-1)
        out = backend.rotate((p @ all_v[:, None]).permute(2, 0, 1, 3).flatten(1, 2))
        x = model.mlp(layer, model.attention_out(layer, out, x))
        found.append((queries, p[..., : seen_k.shape[2]]))
    return found


@pytest.fixture
def read_segments(ids):
    """Prefills `n` segments of `length` tokens each behind the first SINKS tokens; gives the document, all tokens,
    and the blocks of every segment."""

    def run(runner, length, n):
        document, tokens = runner.new_document(SINKS + length), ids(length * n, seed=30)
        found = []
        for k in range(n):
            part, chunk = tokens[k * length : (k + 1) * length], runner.limits.chunk_tokens
            if k:
                runner.keep_prefix(document, SINKS)
            found.append([])
            for at in range(0, length, chunk):
                found[-1] += runner.prefill_chunk(document, part[at : at + chunk])
        return document, tokens, found

    return run


@pytest.mark.parametrize("kv_type", QUANTIZED)
def test_a_segment_is_what_it_is_right_behind_the_sinks(make_runner, read_document, read_segments, kv_type):
    runner, length = make_runner(kv_type), 768
    document, tokens, segments = read_segments(runner, length, 3)
    assert (document.n_tokens, document.next_position, document.last_position) == (1024, 1024, 1023)
    other = make_runner(kv_type, chunk_tokens=256)
    _, blocks = read_document(other, tokens[:SINKS])
    alone = other.new_document(SINKS + length)
    for layer in range(3):
        other.load_blocks(alone, layer, 0, memoryview(blocks[0][layer]), SINKS)
    other.finish_load(alone, SINKS)
    last = tokens[2 * length :]
    found = [other.prefill_chunk(alone, last[at : at + 256]) for at in range(0, length, 256)]
    k, v = decoded(runner, segments[2], length)
    expected_k, expected_v = decoded(other, [b for blocks in found for b in blocks], length)
    # Other chunks see other decoded forms of the tokens before: equal for FP16 but for rounding.
    tolerance = 2e-2 if kv_type is KVType.FP16 else 0.2
    assert (k - expected_k).abs().max() < tolerance * expected_k.abs().max()
    assert (v - expected_v).norm() < tolerance * expected_v.norm()


def test_a_segment_does_not_see_the_one_before(make_runner, ids, read_segments):
    runner, length = make_runner(KVType.K8V4), 600
    document, tokens, segments = read_segments(runner, length, 2)
    fresh = runner.new_document(SINKS + length)
    runner.prefill_chunk(fresh, tokens[:512])
    runner.keep_prefix(fresh, SINKS)
    blocks = []
    for at in range(0, length, 512):
        blocks += runner.prefill_chunk(fresh, tokens[length:][at : at + 512])
    assert as_bytes(blocks) == as_bytes(segments[1])
    # Also what no token uses in the last block: a restored document and a computed one are the same bytes.
    for pool in runner.pool.layers:
        assert torch.equal(pool[document.blocks.long()], pool[fresh.blocks.long()])
    stored = load_layerwise(runner, [segments[0][0], *blocks], SINKS + length)
    question = ids(5, seed=3)
    assert torch.equal(ask(runner, document, tokens, question), ask(runner, stored, tokens, question))


def test_a_segment_resumed_in_its_middle_gives_the_same_bytes(make_runner, read_segments):
    runner, length = make_runner(KVType.K8V4), 1100
    _, tokens, segments = read_segments(runner, length, 2)
    document = runner.new_document(SINKS + length)
    for layer in range(3):
        runner.load_blocks(document, layer, 0, memoryview(segments[0][0][layer]), SINKS)
    runner.finish_load(document, SINKS)
    runner.keep_prefix(document, SINKS)
    for layer in range(3):
        records = bytearray().join(block[layer] for block in segments[1][:2])
        runner.load_blocks(document, layer, SINKS, memoryview(records), 512)
    runner.finish_load(document, SINKS + 512)
    assert document.next_position == SINKS + 512
    rest = tokens[length + 512 :]
    assert as_bytes(runner.prefill_chunk(document, rest[:512])) == as_bytes(segments[1][2:4])
    assert as_bytes(runner.prefill_chunk(document, rest[512:])) == as_bytes(segments[1][4:])


def test_only_whole_blocks_that_are_there_are_kept(make_runner, ids):
    runner = make_runner()
    assert runner.limits.sink_multiple == 256
    document = runner.new_document(700)
    runner.prefill_chunk(document, ids(512))
    for n in (-256, 100, 768):
        with pytest.raises(ValueError, match="cannot be kept"):
            runner.keep_prefix(document, n)
    runner.keep_prefix(document, 0)
    assert (document.n_tokens, document.next_position) == (0, 0)
    runner.prefill_chunk(document, ids(300))
    with pytest.raises(ValueError, match="cannot follow"):
        runner.prefill_chunk(document, ids(10))
    runner.finish_load(document, 0, next_position=900)
    with pytest.raises(ValueError, match="cannot follow"):
        runner.prefill_chunk(document, ids(10))
    with pytest.raises(ValueError, match="cannot be kept"):
        runner.keep_prefix(document, 0)


@pytest.mark.parametrize("kv_type", QUANTIZED)
def test_rows_at_positions_of_their_own_are_asked_about(make_runner, ids, read_document, kv_type):
    runner, tokens, question = make_runner(kv_type), ids(600), ids(6, seed=1)
    _, blocks = read_document(runner, tokens)
    document = load_layerwise(runner, blocks, 600)
    runner.finish_load(document, 600, next_position=3000, last_position=2222)
    assert (document.next_position, document.last_position) == (3000, 2222)
    k, v = decoded(runner, blocks, 600)
    slot, heads = runner.new_tail(), [(layer, head) for layer in range(3) for head in range(2)]
    for n_before in (0, 6):
        expected = exact_pass(runner, question + question[:n_before], range(3000, 3006 + n_before), k, v)
        rows = Rows(slot, document, (question + question[:n_before])[n_before:])
        queries = runner.question_queries(rows, heads).unflatten(0, (3, 2))
        for got, (exact, _) in zip(queries, expected, strict=True):
            torch.testing.assert_close(got, exact[:, :, n_before:], rtol=0, atol=2e-4)
        runner.forward([rows])
    runner.truncate_tail(slot, 0)
    refed = Rows(slot, document, [tokens[-1], *question], refeed=True)
    x = runner._model.embed(torch.tensor(refed.tokens, dtype=torch.int32))
    positions = torch.tensor([2222, *range(3000, 3006)], dtype=torch.int32)
    q, _, _ = rotated_qkv(runner._model, runner.backend, 0, x, positions)
    expected = q.unflatten(1, (2, 3)).permute(1, 2, 0, 3) * runner._model.scale
    torch.testing.assert_close(runner.question_queries(refed, heads[:2]), expected)
    runner.free_document(document)
    assert (document.positions, document.prefix) == (None, 0)


@pytest.mark.parametrize("kv_type", QUANTIZED)
@pytest.mark.parametrize("n_turn", [0, 40])
def test_queries_of_a_question_are_those_of_the_model(make_runner, ids, read_document, kv_type, n_turn):
    runner, tokens, question = make_runner(kv_type), ids(400), ids(7, seed=2)
    document, blocks = read_document(runner, tokens)
    k, v = decoded(runner, blocks, 400)
    slot, turn = runner.new_tail(), ids(n_turn, seed=4)
    if turn:
        runner.forward([Rows(slot, document, turn)])
    before = [x[:, slot, :, :n_turn].clone() for x in (runner._tails.k, runner._tails.v)]
    heads = [(2, 1), (0, 0), (1, 1), (0, 1)]
    queries = runner.question_queries(Rows(slot, document, question), heads)
    assert queries.shape == (4, 3, 7, 32)
    assert queries.dtype == torch.float32
    exact = exact_pass(runner, [*turn, *question], range(400, 407 + n_turn), k, v)
    for got, (layer, head) in zip(queries, heads, strict=True):
        torch.testing.assert_close(got, exact[layer][0][head][:, n_turn:], rtol=0, atol=2e-4)
    assert runner.tail_length(slot) == n_turn
    for x, old in zip((runner._tails.k, runner._tails.v), before, strict=True):
        assert torch.equal(x[:, slot, :, :n_turn], old)
    for wrong in ([], [(3, 0)], [(0, 2)], [(-1, 0)]):
        with pytest.raises(ValueError, match="no KV heads"):
            runner.question_queries(Rows(slot, document, question), wrong)
    with pytest.raises(ValueError, match="do not fit"):
        runner.question_queries(Rows(slot, document, ids(257)), heads)


@pytest.mark.parametrize("kv_type", list(KVType))
def test_fetched_rows_are_seen_and_take_no_positions(make_runner, ids, read_document, kv_type):
    """A document cut in two, its end in the tail: the same answer as of the whole one."""
    runner, tokens, question = make_runner(kv_type), ids(700), ids(8, seed=5)
    whole, blocks = read_document(runner, tokens)
    expected = ask(runner, whole, tokens, question)[1:]
    part = load_layerwise(runner, blocks[:2], 512)
    runner.finish_load(part, 512, next_position=700, last_position=511)
    slot = runner.new_tail()
    runner.import_tail(slot, blocks[2:], 188, fetched=True)
    assert runner.tail_length(slot) == 188
    got = runner.forward([Rows(slot, part, question)])[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)
    assert runner.tail_length(slot) == 196


def test_the_refed_token_sees_no_fetched_row(make_runner, ids, read_document):
    runner, tokens = make_runner(KVType.K8V4), ids(600)
    document, blocks = read_document(runner, tokens)
    slot = runner.new_tail()
    refed = Rows(slot, document, [tokens[-1]], refeed=True)
    expected = runner.forward([refed])[0]
    runner.import_tail(slot, blocks[:1], 256, fetched=True)
    torch.testing.assert_close(runner.forward([refed])[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("n_turn", [0, 30])
def test_dropping_fetched_rows_moves_up_what_stands_behind(make_runner, ids, read_document, n_turn):
    runner, tokens = make_runner(KVType.K8V4, tail_tokens=400), ids(600)
    document, blocks = read_document(runner, tokens)
    slot, turn, question, more = runner.new_tail(), ids(n_turn, seed=1), ids(120, seed=2), ids(5, seed=3)
    if turn:
        runner.forward([Rows(slot, document, turn)])
        runner.export_tail(slot, 0, n_turn)
    runner.import_tail(slot, blocks[2:], 88, fetched=True)
    with pytest.raises(ValueError, match="one run"):
        runner.import_tail(slot, blocks[2:], 88, fetched=True)
    runner.forward([Rows(slot, document, question)])
    own = [
        torch.cat((x[:, slot, :, :n_turn], x[:, slot, :, n_turn + 88 : n_turn + 208]), 2).clone()
        for x in (runner._tails.k, runner._tails.v)
    ]
    runner.drop_fetched(slot)
    assert runner.tail_length(slot) == n_turn + 120
    for x, kept in zip((runner._tails.k, runner._tails.v), own, strict=True):
        assert torch.equal(x[:, slot, :, : n_turn + 120], kept)
    runner.drop_fetched(slot)
    assert runner.tail_length(slot) == n_turn + 120
    turn_blocks = runner.export_tail(slot, n_turn, n_turn + 120)
    other = runner.new_tail()
    if turn:
        runner.import_tail(other, runner.export_tail(slot, 0, n_turn), n_turn)
    runner.import_tail(other, turn_blocks, 120)
    after = [runner.forward([Rows(s, document, more)])[0] for s in (slot, other)]
    torch.testing.assert_close(*after, rtol=0, atol=0)


def test_truncating_and_freeing_a_tail_takes_its_fetched_rows_along(make_runner, ids, read_document):
    runner = make_runner(KVType.K8V4)
    document, blocks = read_document(runner, ids(300))
    slot = runner.new_tail()
    runner.forward([Rows(slot, document, ids(10))])
    runner.import_tail(slot, blocks[1:], 44, fetched=True)
    runner.forward([Rows(slot, document, ids(3))])
    for length, own in ((56, 12), (54, 10), (30, 10), (10, 10), (4, 4)):
        runner.truncate_tail(slot, length)
        assert (runner.tail_length(slot), runner._tails.own_length(slot)) == (length, own)
    assert not runner._tails.has_fetched(slot)
    runner.import_tail(slot, blocks[1:], 44, fetched=True)
    runner.free_tail(slot)
    again = runner.new_tail()
    assert again == slot
    assert not runner._tails.has_fetched(again)


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize(("sinks", "first", "last"), [(256, 256, 900), (0, 0, 512), (16, 300, 301), (100, 100, 700)])
def test_replay_gives_the_largest_probability_of_each_token(
    make_runner, ids, read_document, kv_type, sinks, first, last
):
    runner, tokens = make_runner(kv_type), ids(900)
    document, blocks = read_document(runner, tokens)
    repeated = [*ids(9, seed=6), *tokens[first:last]][:300]
    scores = runner.replay(document, repeated, sinks, first, last)
    k, v = decoded(runner, blocks, 900)
    seen = [*range(sinks), *range(first, last)]
    exact = exact_pass(runner, repeated, range(900, 900 + len(repeated)), k[:, :, seen], v[:, :, seen])
    expected = torch.stack([p[..., sinks:].amax((1, 2)) for _, p in exact])
    assert scores.shape == (3, 2, last - first)
    assert (scores.dtype, scores.device.type) == (torch.float32, "cpu")
    torch.testing.assert_close(scores, expected, rtol=2e-3, atol=1e-6)
    assert document.n_tokens == 900


def test_replay_in_slices_gives_what_it_gives_at_once(make_runner, ids, read_document, monkeypatch):
    runner, tokens = make_runner(KVType.K8V4), ids(1200)
    document, _ = read_document(runner, tokens)
    runner.finish_load(document, 1200, next_position=2000)
    repeated = [*ids(9, seed=6), *tokens]
    calls = []
    sliced = runner.replay(document, repeated, 0, 0, 1200, lambda: calls.append(1))
    assert len(calls) == 3
    monkeypatch.setattr(replay, "SCORES", 50_000)
    large = replay.Replay(runner._model, runner.backend, replay.Sight(0, 0, 1200), 4096)
    whole = large(runner.pool.layers, document, torch.tensor(repeated, dtype=torch.int32))
    torch.testing.assert_close(sliced, whole, rtol=1e-4, atol=1e-7)


def test_replay_leaves_the_document_and_the_tails_as_they_are(make_runner, ids, read_document):
    runner, tokens, question = make_runner(KVType.K8V4), ids(500), ids(20, seed=1)
    document, _ = read_document(runner, tokens)
    slot = runner.new_tail()
    expected = torch.cat([runner.forward([Rows(slot, document, [t])])[0] for t in question])
    runner.truncate_tail(slot, 0)
    rest, got = list(question), []

    def step():
        got.append(runner.forward([Rows(slot, document, [rest.pop(0)])])[0])

    runner.replay(document, tokens[:300], 0, 0, 300, step)
    while rest:
        step()
    torch.testing.assert_close(torch.cat(got), expected, rtol=0, atol=0)
    for sinks, first, last in ((0, 300, 501), (301, 300, 400), (0, 300, 300), (-1, 0, 10)):
        with pytest.raises(ValueError, match="of a document of 500"):
            runner.replay(document, tokens, sinks, first, last)
    with pytest.raises(ValueError, match="nothing"):
        runner.replay(document, [], 0, 0, 500)


def test_a_large_log_sum_exp_does_not_leave_half_precision():
    generator = torch.Generator().manual_seed(1)
    keys = torch.zeros(2, 50, 32 + replay.MORE_DIMS)
    keys[..., :32] = torch.randn(2, 50, 32, generator=generator)
    keys[..., 32:34] = 64.0
    q = torch.randn(40, 6, 32, generator=generator) * 300
    scores = torch.einsum("nhgd,hkd->hgnk", q.unflatten(1, (2, 3)), keys[..., :32])
    lse = scores.amax(-1) + 0.5
    expected = (scores - lse[..., None]).amax((1, 2))
    assert lse.max() > 5000
    torch.testing.assert_close(replay.largest(q, lse, keys), expected, rtol=1e-3, atol=0.05)
