"""The card's runner on a CPU in FP32, with drafts behind a sequence's last token: logits, tails and where it looked are
those of one row at a time, with and without captured steps, and those of the torch engine."""

import pytest
import torch

from cache_store.layout import KVType
from service.engine.exl2_engine.graph_sizes import DRAFT_ROWS, bounds, step_rows
from service.engine.exl2_engine.graphs import DecodeGraphs, Repeat
from service.engine.exl2_engine.kernels.attend import query_tile
from service.engine.protocol import Rows
from service.engine.torch_engine.runner import TorchRunner
from tests.service.engine.exl2_engine.draft_cases import PROMPTS, STEPS, answer, begin, one_by_one
from tests.service.engine.runner_parts import log_probs

HEADS = ((2, 1), (0, 0))


@pytest.fixture(scope="module")
def runner_of(make_runner):
    """A runner for a KV type; `graphed` with repeated steps in place of captured ones."""
    made = {}

    def make(kv_type, *, graphed=False):
        if kv_type not in made:
            made[kv_type] = make_runner(kv_type, draft_tokens=7, watched_heads=HEADS)
            made[kv_type].made = DecodeGraphs(
                made[kv_type].step_logits, Repeat, torch.device("cpu"), max_rows=16, max_tokens=4096, max_tail=256
            )
            with torch.inference_mode():
                made[kv_type].made.capture_all()
        runner = made[kv_type]
        runner.graphs = runner.made if graphed else None
        return runner

    return make


@pytest.fixture
def texts(ids):
    return [ids(90, seed=i) for i in range(3)]


def answered(runner, ids, read_document, texts, steps, *, watch=False):
    """What `answer` gives for two sequences on one document and one on none, their tails, and where they looked."""
    document, _ = read_document(runner, ids(300, seed=20))
    documents = [document, document, None]
    slots = begin(runner, documents, texts)
    for slot in slots if watch else ():
        runner.watch_tail(slot)
    found = answer(runner, documents, texts, steps, slots, ids(8, seed=9))
    lengths = [runner.tail_length(slot) for slot in slots]
    looks = [runner.tail_looks(slot, document, [2, 4]) for slot in slots[:2]] if watch else []
    for slot in slots:
        runner.free_tail(slot)
    runner.free_document(document)
    return found, lengths, looks


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("kv_type", list(KVType))
def test_drafts_change_no_logits(runner_of, ids, read_document, texts, kv_type, graphed):
    expected, lengths, _ = answered(runner_of(kv_type), ids, read_document, texts, one_by_one(STEPS))
    runner = runner_of(kv_type, graphed=graphed)
    replayed = runner.made.n_replayed
    found, same_lengths, _ = answered(runner, ids, read_document, texts, STEPS)
    for got, one in zip(found, expected, strict=True):
        torch.testing.assert_close(got, one, rtol=0, atol=2e-4)
    of_each = zip(PROMPTS, zip(*STEPS, strict=True), strict=True)
    assert same_lengths == lengths == [n + sum(1 + right for right, _ in s) for n, s in of_each]
    assert runner.made.n_replayed - replayed == (len(STEPS) if graphed else 0)


@pytest.mark.parametrize("kv_type", list(KVType))
def test_the_torch_engine_gives_the_same(runner_of, tiny_dir, ids, read_document, texts, kv_type):
    theirs = TorchRunner.load(
        tiny_dir, kv_type=kv_type, compute_dtype="float32", n_slots=6, tail_tokens=256, chunk_tokens=512
    )
    expected, _, _ = answered(theirs, ids, read_document, texts, STEPS)
    found, _, _ = answered(runner_of(kv_type, graphed=True), ids, read_document, texts, STEPS)
    for got, one in zip(found, expected, strict=True):
        p, q = log_probs(one), log_probs(got)
        assert float((p.exp() * (p - q)).sum(-1).max()) < 1e-4


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V4, KVType.K4V4])
def test_what_was_guessed_wrong_does_not_count_for_where_an_answer_looked(
    runner_of, ids, read_document, texts, kv_type, graphed
):
    single = runner_of(kv_type)
    _, _, expected = answered(single, ids, read_document, texts, one_by_one(STEPS), watch=True)
    drafted = runner_of(kv_type, graphed=graphed)
    _, _, found = answered(drafted, ids, read_document, texts, STEPS, watch=True)
    for got, one in zip(found, expected, strict=True):
        torch.testing.assert_close(got.document, one.document, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(got.tail, one.tail, rtol=1e-3, atol=1e-5)


def test_a_turn_with_drafts_is_stored_as_one_without(runner_of, ids, texts):
    runner, stored = runner_of(KVType.K8V8, graphed=True), []
    for steps in (STEPS, one_by_one(STEPS)):
        slots = begin(runner, [None] * 3, texts)
        answer(runner, [None] * 3, texts, steps, slots, ids(8, seed=9))
        blocks = runner.export_tail(slots[0], 0, runner.tail_length(slots[0]))
        resumed = runner.new_tail()
        runner.import_tail(resumed, blocks, runner.tail_length(slots[0]))
        after = [runner.forward([Rows(slot, None, [7, 8])])[0] for slot in (slots[0], resumed)]
        assert torch.equal(*after)
        stored.append([len(record) for block in blocks for record in block])
        for slot in (*slots, resumed):
            runner.free_tail(slot)
    assert stored[0] == stored[1]


def test_a_tail_without_room_for_its_drafts_refuses_and_changes_nothing(runner_of, ids):
    runner = runner_of(KVType.K8V4, graphed=True)
    slot = runner.new_tail()
    runner.forward([Rows(slot, None, ids(250), logits_from=249)])
    with pytest.raises(ValueError, match="do not fit a tail of 256"):
        runner.forward([Rows(slot, None, ids(7))])
    assert runner.tail_length(slot) == 250
    assert runner.forward([Rows(slot, None, ids(6))])[0].shape == (6, 384)
    runner.free_tail(slot)


@pytest.mark.parametrize(
    ("asked", "cheap", "tokens", "rows"), [(7, 32, 7, DRAFT_ROWS), (7, 4, 3, 4), (0, 32, 0, DRAFT_ROWS), (2, 32, 2, 16)]
)
def test_as_many_drafts_as_the_model_multiplies_cheaply(make_runner, monkeypatch, asked, cheap, tokens, rows):
    monkeypatch.setattr("service.engine.exl2_engine.plain.PlainModel.cheap_rows", cheap)
    limits = make_runner(draft_tokens=asked).limits
    assert (limits.draft_tokens, limits.draft_rows) == (tokens, rows)


def test_graphs_have_rows_for_drafts_as_far_as_they_are_cheap():
    assert bounds((1, 2, 4), 4) == [1, 2, 4]
    assert bounds((1, 2, 4), 3) == [1, 2, 3]
    assert step_rows(8, 0, 5) == [1, 2, 4, 8]
    assert step_rows(8, 7, 4) == [1, 2, 4, 8, 16]
    assert step_rows(1, 7, 4) == [1, 2, 4, 8]
    assert step_rows(3, 3, 4, draft_rows=4) == [1, 2, 4]
    assert step_rows(24, 7, 4) == [1, 2, 4, 8, 16, 24]


@pytest.mark.parametrize(("group_heads", "rows"), [(5, 3), (3, 5), (16, 1), (71, 1), (7, 2)])
def test_there_is_a_graph_for_the_rows_of_the_first_tile_of_attention(group_heads, rows):
    found = step_rows(8, 7, group_heads)
    assert sorted({1, 2, 4, 8, 16, rows}) == found
    assert query_tile(rows * group_heads, 128, 90) == query_tile(group_heads, 128, 90)


def test_steps_of_sizes_in_between_have_graphs_of_their_own(make_runner):
    runner = make_runner(KVType.K8V4)
    graphs = DecodeGraphs(
        runner.step_logits, Repeat, torch.device("cpu"), max_rows=8, max_tokens=512, max_tail=256, more_rows=[3, 8]
    )
    assert graphs.rows == [1, 2, 3, 4, 8]
