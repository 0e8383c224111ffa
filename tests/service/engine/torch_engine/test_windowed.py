"""What windowed documents ask of the runner, against stock transformers under the mask that says who sees whom."""

import pytest
import torch
from transformers import DynamicCache

from cache_store.codec import decode_records, encode_records
from cache_store.layout import KVType
from service.engine.protocol import Rows
from service.engine.torch_engine import probes
from service.engine.torch_engine.kv import KVMemory
from tests.service.engine.runner_parts import ask, load_layerwise

N = 700
KEPT = [*range(16), 40, 41, 300, 512, *range(600, N)]
"""Rows of a resident document: sinks, some slots, a window."""
FETCHED = range(320, 384)
TURN, QUESTION = 12, 9
CHUNK = 512


@pytest.fixture
def texts(token_ids):
    """A document, a turn and a question."""
    return token_ids(N), token_ids(TURN, seed=1), token_ids(QUESTION, seed=2)


class Stock:
    """Stock transformers behind a cache, which `prefill` rounds to FP16 chunk by chunk, as a document is stored."""

    def __init__(self, model):
        self.model, self.cache = model, DynamicCache()

    def prefill(self, tokens, chunk=CHUNK):
        for first in range(0, len(tokens), chunk):
            at = self.cache.get_seq_length()
            self.run(tokens[first : first + chunk])
            for layer in self.cache.layers:
                for x in (layer.keys, layer.values):
                    x[:, :, at:] = x[:, :, at:].half().float()
        return self

    def crop(self, n):
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :n], layer.values[:, :, :n]

    def run(self, tokens, sees=None, first_position=None):
        """Tokens that see the `sees` of the cached ones, and themselves causally."""
        n, past = len(tokens), self.cache.get_seq_length()
        hidden = torch.ones(n, past + n, dtype=torch.bool).triu(past + 1)
        if sees is not None:
            hidden[:, :past] = True
            hidden[:, list(sees)] = False
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min)
        start = past if first_position is None else first_position
        with torch.no_grad():
            # By place: the cache's keyword has another name in newer releases.
            positions = torch.arange(start, start + n)[None]
            return self.model(torch.tensor([tokens]), mask[None, None], positions, self.cache, output_attentions=True)


def assert_same(reference, logits, atol=1e-3):
    torch.testing.assert_close(reference.logits[0], logits, rtol=0, atol=atol)


def picked(document, rows):
    """Rows of a document as encoded blocks."""
    layout, rotated = document.memory.layout, document.memory.layout.kv_type is not KVType.FP16
    layers = [
        encode_records(k[:, list(rows)], v[:, list(rows)], layout, rotated=rotated)
        for k, v in zip(document.k, document.v, strict=True)
    ]
    return [list(block) for block in zip(*layers, strict=True)]


def resident_of(runner, document, rows, next_position, last_position):
    resident = load_layerwise(runner, picked(document, rows), len(rows))
    runner.finish_load(resident, len(rows), next_position=next_position, last_position=last_position)
    return resident


@pytest.mark.parametrize("kv_type", list(KVType))
def test_all_rows_of_a_document_as_a_resident_one_give_the_same_bits(load_runner, prefill, texts, kv_type):
    runner, (tokens, _, question) = load_runner(kv_type), texts
    document, _ = prefill(runner, tokens)
    resident = resident_of(runner, document, range(N), N, N - 1)
    assert (document.next_position, document.last_position) == (N, N - 1)
    assert torch.equal(ask(runner, document, tokens, question), ask(runner, resident, tokens, question))


def test_picked_rows_are_what_a_question_sees_at_their_own_positions(load_runner, eager, prefill, texts):
    runner, (tokens, _, question) = load_runner(), texts
    document, _ = prefill(runner, tokens)
    resident = resident_of(runner, document, KEPT, N, N - 1)
    logits = ask(runner, resident, tokens, question)
    assert_same(Stock(eager).prefill(tokens).run(question, sees=KEPT), logits[1:])
    far = resident_of(runner, document, KEPT, N + 50, N - 1)
    moved = ask(runner, far, tokens, question)
    assert torch.equal(moved[0], logits[0])
    assert_same(Stock(eager).prefill(tokens).run(question, sees=KEPT, first_position=N + 50), moved[1:])
    assert not torch.isclose(moved[1:], logits[1:], atol=1e-2).all()


def test_a_re_fed_token_stands_at_the_last_position(load_runner, prefill, texts):
    runner, (tokens, _, question) = load_runner(), texts
    document, _ = prefill(runner, tokens)
    wrong = resident_of(runner, document, KEPT, N, N - 30)
    right = resident_of(runner, document, KEPT, N, N - 1)
    a, b = (ask(runner, d, tokens, question) for d in (wrong, right))
    assert not torch.isclose(a[0], b[0], atol=1e-2).all()
    assert torch.equal(a[1:], b[1:])


@pytest.mark.parametrize("sinks", [0, 16, 37])
def test_segments_see_the_sinks_and_themselves_only(load_runner, eager, token_ids, sinks):
    runner, segment, tokens = load_runner(chunk_tokens=256), 512, token_ids(1300)
    document = runner.new_document(sinks + segment)
    runner.prefill_chunk(document, tokens[:256])
    question = token_ids(QUESTION, seed=2)
    plain = Stock(eager).prefill(tokens[:sinks] or tokens[:1], 256)
    plain.crop(sinks)
    for first in range(segment, len(tokens), segment):
        own = tokens[first : first + segment]
        runner.keep_prefix(document, sinks)
        for at in range(0, len(own), 256):
            runner.prefill_chunk(document, own[at : at + 256])
        assert document.next_position == sinks + len(own)
        logits = ask(runner, document, own, question)
        assert_same(plain.prefill(own, 256).run(question), logits[1:])
        plain.crop(sinks)


@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K4V4])
def test_a_segment_resumed_behind_loaded_sinks_gives_the_same_bytes(load_runner, token_ids, kv_type):
    runner, sinks, tokens = load_runner(kv_type, chunk_tokens=256), 16, token_ids(1024)
    document = runner.new_document(sinks + 512)
    runner.prefill_chunk(document, tokens[:256])
    head = picked(document, range(sinks))
    runner.keep_prefix(document, sinks)
    blocks = runner.prefill_chunk(document, tokens[512:768]) + runner.prefill_chunk(document, tokens[768:])
    again = runner.new_document(sinks + 512)
    for layer in range(3):
        runner.load_blocks(again, layer, 0, head[0][layer], sinks)
    runner.finish_load(again, sinks)
    runner.keep_prefix(again, sinks)
    for layer in range(3):
        runner.load_blocks(again, layer, sinks, blocks[0][layer], 256)
    runner.finish_load(again, sinks + 256)
    assert runner.prefill_chunk(again, tokens[768:]) == blocks[1:]


@pytest.mark.parametrize("n", [5, 40])
def test_a_short_last_segment_is_not_disturbed_by_what_memory_held(load_runner, prefill, token_ids, n, monkeypatch):
    """The segments of a document share one document of the runner, which the last need not fill."""
    runner, tokens, question = load_runner(), token_ids(300), token_ids(n, seed=2)
    expected = ask(runner, prefill(runner, tokens)[0], tokens, question)
    honest = KVMemory.empty
    monkeypatch.setattr(KVMemory, "empty", lambda *a: tuple(x.fill_(torch.nan) for x in honest(*a)))
    document = runner.new_document(400)
    runner.prefill_chunk(document, tokens)
    torch.testing.assert_close(ask(runner, document, tokens, question), expected, rtol=0, atol=1e-4)


def test_what_cannot_be_a_prefix_is_refused(load_runner, prefill, texts):
    runner, (tokens, _, _) = load_runner(), texts
    document, _ = prefill(runner, tokens)
    resident = resident_of(runner, document, KEPT, N, N - 1)
    for wrong, n in ((document, N + 1), (resident, 16)):
        with pytest.raises(ValueError, match="keep"):
            runner.keep_prefix(wrong, n)
    with pytest.raises(ValueError, match="chunk"):
        runner.prefill_chunk(resident, tokens[:5])


@pytest.fixture
def fetched(load_runner, prefill, texts):
    """A runner, a resident document, and two tails with the same turn; the first has rows fetched behind it."""
    runner, (tokens, turn, _) = load_runner(), texts
    document, _ = prefill(runner, tokens)
    resident = resident_of(runner, document, KEPT, N, N - 1)
    slots = [runner.new_tail(), runner.new_tail()]
    for slot in slots:
        runner.forward([Rows(slot, resident, turn)])
    runner.import_tail(slots[0], picked(document, FETCHED), len(FETCHED), fetched=True)
    yield runner, resident, slots
    for slot in slots:
        runner.free_tail(slot)


def test_fetched_rows_are_seen_by_the_question_alone_and_move_no_position(fetched, eager, texts):
    (runner, resident, slots), (tokens, turn, question) = fetched, texts
    both = runner.forward([Rows(slot, resident, question) for slot in slots])
    for logits, extra in zip(both, (FETCHED, ()), strict=True):
        plain = Stock(eager).prefill(tokens)
        plain.run(turn, sees=KEPT)
        assert_same(plain.run(question, sees=[*KEPT, *extra, *range(N, N + TURN)]), logits)
    assert not torch.isclose(both[0], both[1], atol=1e-2).all()


def test_a_re_fed_token_sees_no_fetched_row(fetched, texts):
    (runner, resident, slots), (tokens, _, question) = fetched, texts
    logits = [runner.forward([Rows(s, resident, [tokens[-1], *question], refeed=True)])[0] for s in slots]
    torch.testing.assert_close(logits[0][0], logits[1][0], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[0][0], ask(runner, resident, tokens, question)[0], rtol=0, atol=1e-5)


def test_dropped_rows_leave_the_others_as_they_are(fetched, texts):
    (runner, resident, slots), (_, _, question) = fetched, texts
    runner.forward([Rows(slots[0], resident, question)])
    assert [runner.tail_length(s) for s in slots] == [TURN + len(FETCHED) + QUESTION, TURN]
    tails = [runner._tails[s] for s in slots]
    written = [x[:, :, TURN + len(FETCHED) : tails[0].length].clone() for x in (tails[0].k, tails[0].v)]
    for slot in slots:
        runner.drop_fetched(slot)
        runner.drop_fetched(slot)
    assert [runner.tail_length(s) for s in slots] == [TURN + QUESTION, TURN]
    assert torch.equal(tails[0].k[:, :, TURN : TURN + QUESTION], written[0])
    assert torch.equal(tails[0].v[:, :, TURN : TURN + QUESTION], written[1])
    blocks = runner.export_tail(slots[0], TURN, TURN + QUESTION)
    runner.import_tail(slots[1], blocks, QUESTION)
    went_on = [runner.forward([Rows(s, resident, question[:3])])[0] for s in slots]
    assert torch.equal(*went_on)


def test_without_what_a_question_added_a_fetch_leaves_no_trace(fetched, texts):
    (runner, resident, slots), (_, _, question) = fetched, texts
    runner.forward([Rows(slots[0], resident, question)])
    runner.truncate_tail(slots[0], TURN + len(FETCHED) - 5)
    runner.drop_fetched(slots[0])
    assert runner.tail_length(slots[0]) == TURN
    a, b = (runner.forward([Rows(s, resident, question)])[0] for s in slots)
    assert torch.equal(a, b)


def test_a_tail_has_one_run_of_fetched_rows(fetched, load_runner):
    runner, _, slots = fetched
    tail = runner._tails[slots[0]]
    blocks = runner.export_tail(slots[0], 0, 4)
    length = tail.length
    with pytest.raises(ValueError, match="already"):
        runner.import_tail(slots[0], blocks, 4, fetched=True)
    assert tail.length == length
    runner.import_tail(slots[0], blocks, 4)
    runner.drop_fetched(slots[0])
    assert tail.length == TURN + 4
    runner.import_tail(slots[0], blocks, 4, fetched=True)
    other = runner.new_tail()
    assert runner._tails[other].n_fetched == 0
    runner.free_tail(other)


def decoded_keys(blocks, layout, n):
    """Keys of each layer as the index of a document decodes them: ``[n_layers, kv_heads, n, d]``."""
    k, v = torch.empty(2, layout.n_layers, layout.n_kv_heads, n, layout.head_dim)
    for layer in range(layout.n_layers):
        records = memoryview(bytearray().join(block[layer] for block in blocks))
        rotated = layout.kv_type is not KVType.FP16
        decode_records(records, n, layout, out_k=k[layer], out_v=v[layer], rotated=rotated)
    return k


HEADS = [(2, 1), (0, 0), (2, 0)]


@pytest.mark.parametrize(("kv_type", "tolerance"), [(KVType.FP16, 5e-4), (KVType.K8V8, 5e-2)])
@pytest.mark.parametrize("refeed", [False, True])
def test_queries_times_decoded_keys_are_attention_scores(
    load_runner, eager, prefill, texts, kv_type, tolerance, refeed
):
    runner, (tokens, turn, question) = load_runner(kv_type), texts
    document, blocks = prefill(runner, tokens)
    slot = runner.new_tail()
    turn = [] if refeed else turn
    if turn:
        runner.forward([Rows(slot, document, turn)])
    rows = Rows(slot, document, [tokens[-1], *question] if refeed else question, refeed=refeed)
    queries = runner.question_queries(rows, HEADS)
    assert queries.shape == (3, 3, len(rows.tokens), 64)
    assert (queries.dtype, queries.device.type) == (torch.float32, "cpu")
    keys = decoded_keys(blocks, runner.layout, N)
    plain = Stock(eager).prefill(tokens[:-1] if refeed else tokens)
    if turn:
        plain.run(turn)
    reference = plain.run(rows.tokens).attentions
    for (layer, head), q in zip(HEADS, queries, strict=True):
        mine = (q @ keys[layer, head].T).softmax(-1)
        theirs = reference[layer][0, 3 * head : 3 * head + 3, :, :N]
        torch.testing.assert_close(mine, theirs / theirs.sum(-1, keepdim=True), rtol=0, atol=tolerance)
    runner.free_tail(slot)


def test_asking_for_queries_changes_nothing(fetched, texts):
    (runner, resident, slots), (_, _, question) = fetched, texts
    tail = runner._tails[slots[0]]
    before, length = tail.k[:, :, : tail.length].clone(), tail.length
    first = runner.question_queries(Rows(slots[0], resident, question), HEADS)
    assert tail.length == length
    assert torch.equal(tail.k[:, :, :length], before)
    assert torch.equal(first, runner.question_queries(Rows(slots[0], resident, question), HEADS))


@pytest.mark.parametrize(("deepest", "layers"), [(0, 1), (1, 2), (2, 3)])
def test_queries_cost_no_layer_beyond_the_deepest(load_runner, prefill, texts, deepest, layers, monkeypatch):
    runner, (tokens, _, question) = load_runner(), texts
    document, _ = prefill(runner, tokens)
    seen, honest = [], probes.QueriesPlan.attend
    monkeypatch.setattr(
        probes.QueriesPlan, "attend", lambda self, layer, *qkv: (seen.append(layer), honest(self, layer, *qkv))[1]
    )
    slot = runner.new_tail()
    runner.question_queries(Rows(slot, document, question), [(0, 2), (deepest, 0)])
    runner.free_tail(slot)
    assert seen == list(range(layers))


def test_queries_that_cannot_be_had_are_refused(load_runner, texts):
    runner, (_, _, question) = load_runner(), texts
    slot = runner.new_tail()
    for wrong in ([], [(3, 0)], [(0, 3)], [(-1, 0)]):
        with pytest.raises(ValueError, match="KV heads"):
            runner.question_queries(Rows(slot, None, question), wrong)
    with pytest.raises(ValueError, match="fit"):
        runner.question_queries(Rows(slot, None, question * 40), HEADS)
    runner.free_tail(slot)


def stock_looks(eager, tokens, replayed, sinks, first, last):
    attentions = Stock(eager).prefill(tokens).run(replayed, sees=[*range(sinks), *range(first, last)]).attentions
    return torch.stack([a[0, :, :, first:last].amax(1).view(3, 3, -1).amax(1) for a in attentions])


@pytest.mark.parametrize(("sinks", "first", "last"), [(16, 16, 500), (16, 300, 700), (0, 0, 700), (4, 699, 700)])
@pytest.mark.parametrize("scores_at_once", [1 << 22, 1 << 16])
def test_replay_gives_the_largest_attention(
    load_runner, eager, prefill, texts, sinks, first, last, scores_at_once, monkeypatch
):
    monkeypatch.setattr(probes, "_SCORES_AT_ONCE", scores_at_once)
    runner, (tokens, turn, _) = load_runner(), texts
    document, _ = prefill(runner, tokens)
    replayed = turn + tokens[first:last]
    before = document.k[:, :, :N].clone()
    looks = runner.replay(document, replayed, sinks, first, last)
    assert (looks.shape, looks.dtype) == ((3, 3, last - first), torch.float32)
    torch.testing.assert_close(looks, stock_looks(eager, tokens, replayed, sinks, first, last), rtol=0, atol=5e-4)
    assert torch.equal(document.k[:, :, :N], before)
    assert document.n_tokens == N


@pytest.mark.parametrize(("kv_type", "share"), [(KVType.K8V8, 0.02), (KVType.K8V4, 0.15)])
def test_replay_over_quantized_keys_is_close(load_runner, eager, prefill, texts, kv_type, share):
    runner, (tokens, turn, _) = load_runner(kv_type), texts
    document, _ = prefill(runner, tokens)
    looks = runner.replay(document, turn + tokens[16:], 16, 16, N)
    reference = stock_looks(eager, tokens, turn + tokens[16:], 16, 16, N)
    assert (looks - reference).abs().mean() < share * reference.mean()


def test_a_replay_stops_between_two_layers(load_runner, prefill, texts):
    class Cancelled(Exception):
        pass

    runner, (tokens, _, question) = load_runner(), texts
    document, _ = prefill(runner, tokens)
    expected, seen = ask(runner, document, tokens, question), []

    def between():
        seen.append(ask(runner, document, tokens, question))
        if len(seen) == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        runner.replay(document, tokens[16:300], 16, 16, 300, between)
    assert all(torch.equal(expected, logits) for logits in seen)
    with pytest.raises(ValueError, match="sinks"):
        runner.replay(document, tokens, 16, 8, 300)
