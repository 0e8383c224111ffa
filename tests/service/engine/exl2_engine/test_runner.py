"""The card engine's runner on a CPU in FP32, against the torch engine and against itself."""

import pytest
import torch

from cache_store.layout import KVType
from service.engine.exl2_engine.best import best_of
from service.engine.exl2_engine.loading import Options, load_runner
from service.engine.exl2_engine.pool import PoolExhausted
from service.engine.exl2_engine.warming import warm_up
from service.engine.models.errors import EngineRefused
from service.engine.protocol import Best, Rows
from service.engine.torch_engine.runner import TorchRunner
from tests.service.engine.runner_parts import ask, load_layerwise, log_probs

CHUNK = 512


@pytest.fixture(scope="module")
def torch_runner(tiny_dir):
    made = {}

    def make(kv_type):
        if kv_type not in made:
            made[kv_type] = TorchRunner.load(
                tiny_dir, kv_type=kv_type, compute_dtype="float32", n_slots=6, tail_tokens=256, chunk_tokens=CHUNK
            )
        return made[kv_type]

    return make


def worst_kl(reference, logits):
    p, q = log_probs(reference), log_probs(logits)
    return float((p.exp() * (p - q)).sum(-1).max())


def as_bytes(blocks):
    return [bytes(record) for block in blocks for record in block]


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize("n_document", [1, 255, 256, 257, 1100])
def test_it_predicts_what_the_torch_engine_predicts(make_runner, torch_runner, ids, read_document, kv_type, n_document):
    tokens, question = ids(n_document), ids(9, seed=1)
    ours, reference = make_runner(kv_type), torch_runner(kv_type)
    document, blocks = read_document(ours, tokens)
    expected, expected_blocks = read_document(reference, tokens)
    assert [[len(r) for r in b] for b in blocks] == [[len(r) for r in b] for b in expected_blocks]
    logits = ask(ours, document, tokens, question)
    assert worst_kl(ask(reference, expected, tokens, question), logits) < 1e-4


@pytest.mark.parametrize("kv_type", list(KVType))
def test_a_restored_document_is_the_computed_one(make_runner, ids, read_document, kv_type):
    runner, tokens, question = make_runner(kv_type), ids(1100), ids(7, seed=2)
    document, blocks = read_document(runner, tokens)
    restored = load_layerwise(runner, blocks, len(tokens))
    assert not set(document.block_ids) & set(restored.block_ids)
    for pool in runner.pool.layers:
        assert torch.equal(pool[document.blocks.long()], pool[restored.blocks.long()])
    assert torch.equal(ask(runner, document, tokens, question), ask(runner, restored, tokens, question))


def test_blocks_of_another_engine_of_the_same_layout_are_read(make_runner, torch_runner, ids, read_document):
    tokens, question = ids(700), ids(7, seed=2)
    reference, ours = torch_runner(KVType.K8V4), make_runner(KVType.K8V4)
    theirs, blocks = read_document(reference, tokens)
    restored = load_layerwise(ours, blocks, len(tokens))
    assert worst_kl(ask(reference, theirs, tokens, question), ask(ours, restored, tokens, question)) < 1e-6


def test_a_prefill_resumed_at_a_chunk_boundary_gives_the_same_bytes(make_runner, ids, read_document):
    runner, tokens = make_runner(KVType.K8V4), ids(1300)
    _, blocks = read_document(runner, tokens)
    document = runner.new_document(len(tokens))
    for layer in range(3):
        records = bytearray().join(block[layer] for block in blocks[:4])
        runner.load_blocks(document, layer, 0, memoryview(records), 1024)
    runner.finish_load(document, 1024)
    assert as_bytes(runner.prefill_chunk(document, tokens[1024:])) == as_bytes(blocks[4:])


@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V4])
def test_sequences_in_one_forward_get_what_they_get_alone(make_runner, ids, read_document, kv_type):
    runner = make_runner(kv_type)
    texts = [ids(300, seed=3), ids(520, seed=4)]
    documents = [read_document(runner, text)[0] for text in texts]
    jobs = [(0, 4), (1, 9), (0, 1), (1, 30)]
    questions = [ids(n, seed=10 + i) for i, (_, n) in enumerate(jobs)]
    alone = [ask(runner, documents[d], texts[d], q) for (d, _), q in zip(jobs, questions, strict=True)]
    slots = [runner.new_tail() for _ in range(5)]
    batch = [
        Rows(slot, documents[d], [texts[d][-1], *q], refeed=True)
        for slot, (d, _), q in zip(slots, jobs, questions, strict=False)
    ]
    lone = Rows(slots[4], None, ids(6, seed=20))
    together = runner.forward([batch[0], lone, *batch[1:]])
    for one, batched in zip(alone, [together[0], *together[2:]], strict=True):
        torch.testing.assert_close(one, batched, rtol=0, atol=2e-4)
    runner.truncate_tail(slots[0], 0)
    apart = runner.forward([Rows(slots[0], None, ids(6, seed=20))])[0]
    torch.testing.assert_close(together[1], apart, rtol=0, atol=2e-4)


@pytest.mark.parametrize("n_document", [0, 400])
def test_one_token_at_a_time_equals_all_at_once(make_runner, ids, read_document, n_document):
    runner, question = make_runner(KVType.K8V8), ids(20, seed=5)
    document = read_document(runner, ids(n_document))[0] if n_document else None
    slot = runner.new_tail()
    whole = runner.forward([Rows(slot, document, question)])[0]
    runner.truncate_tail(slot, 0)
    single = torch.cat([runner.forward([Rows(slot, document, [t])])[0] for t in question])
    torch.testing.assert_close(whole, single, rtol=0, atol=2e-4)
    assert runner.tail_length(slot) == len(question)


def test_only_the_wanted_rows_have_logits(make_runner, ids):
    runner = make_runner()
    slots = [runner.new_tail() for _ in range(2)]
    tokens = ids(5)
    first, second = runner.forward([Rows(slots[0], None, tokens, logits_from=4), Rows(slots[1], None, tokens)])
    assert first.shape == (1, 384)
    assert second.shape == (5, 384)
    torch.testing.assert_close(first[0], second[4])
    none = runner.forward([Rows(slots[0], None, tokens, logits_from=5)])[0]
    assert none.shape == (0, 384)


@pytest.mark.parametrize("kv_type", list(KVType))
def test_going_on_after_an_export_equals_resuming_from_it(make_runner, ids, read_document, kv_type):
    runner, tokens, turn = make_runner(kv_type), ids(300), ids(70, seed=6)
    document, _ = read_document(runner, tokens)
    going, resumed = runner.new_tail(), runner.new_tail()
    runner.forward([Rows(going, document, [tokens[-1], *turn], refeed=True)])
    blocks = runner.export_tail(going, 0, len(turn))
    assert [len(b) for b in blocks] == [3]
    assert len(blocks[0][0]) == runner.layout.record_nbytes(len(turn))
    runner.import_tail(resumed, blocks, len(turn))
    assert runner.tail_length(resumed) == len(turn)
    more = ids(5, seed=7)
    after = [runner.forward([Rows(slot, document, more)])[0] for slot in (going, resumed)]
    torch.testing.assert_close(*after, rtol=0, atol=0)
    second = [runner.export_tail(slot, len(turn), len(turn) + 5) for slot in (going, resumed)]
    assert as_bytes(second[0]) == as_bytes(second[1])


def test_a_tail_of_several_blocks_goes_out_and_in(make_runner, torch_runner, ids):
    runner = make_runner(KVType.K4V4, tail_tokens=700)
    tokens = ids(600)
    slot, other = runner.new_tail(), runner.new_tail()
    runner.forward([Rows(slot, None, tokens)])
    blocks = runner.export_tail(slot, 10, 600)
    assert [len(b[0]) for b in blocks] == [runner.layout.record_nbytes(n) for n in (256, 256, 78)]
    runner.import_tail(other, blocks, 590)
    for layer in range(3):
        for ours, theirs in zip(
            runner._tails.tokens(layer, slot, 10, 600), runner._tails.tokens(layer, other, 0, 590), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_a_tail_without_room_refuses_and_changes_nothing(make_runner, ids):
    runner = make_runner()
    slot = runner.new_tail()
    runner.forward([Rows(slot, None, ids(250))])
    with pytest.raises(ValueError, match="do not fit a tail of 256"):
        runner.forward([Rows(slot, None, ids(7))])
    assert runner.tail_length(slot) == 250
    for first, last in [(0, 251), (3, 3), (-1, 4)]:
        with pytest.raises(ValueError, match="not in a tail"):
            runner.export_tail(slot, first, last)


def test_freed_blocks_are_used_again_and_nothing_leaks(make_runner, ids, read_document):
    runner = make_runner(KVType.K8V4, n_blocks=6)
    reference, question = make_runner(KVType.K8V4), ids(6, seed=9)
    expected = {}
    for i in range(40):
        tokens = ids((256, 300, 513, 700)[i % 4], seed=100 + i % 4)
        if i % 4 not in expected:
            expected[i % 4] = ask(reference, read_document(reference, tokens)[0], tokens, question)
        document, _ = read_document(runner, tokens)
        assert document.nbytes == runner.document_nbytes(len(tokens))
        torch.testing.assert_close(ask(runner, document, tokens, question), expected[i % 4], rtol=0, atol=1e-5)
        runner.free_document(document)
    assert runner.pool.n_free == 6
    assert runner.tails_used == 0


def test_a_document_that_does_not_fit_is_refused_and_takes_nothing(make_runner):
    runner = make_runner(n_blocks=4)
    kept = runner.new_document(600)
    with pytest.raises(PoolExhausted, match="2 blocks are needed, free are 1 of 4"):
        runner.new_document(257)
    runner.new_document(256)
    runner.free_document(kept)
    assert runner.pool.n_free == 3
    runner.free_document(kept)
    assert runner.pool.n_free == 3


def test_a_cancelled_chunk_leaves_the_document_as_it_was(make_runner, ids, read_document):
    runner, tokens = make_runner(KVType.K8V4), ids(1000)
    _, expected = read_document(runner, tokens)
    document = runner.new_document(1000)
    runner.prefill_chunk(document, tokens[:512])
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("cancelled")

    with pytest.raises(KeyError):
        runner.prefill_chunk(document, tokens[512:], stop)
    assert document.n_tokens == 512
    blocks = runner.prefill_chunk(document, tokens[512:], lambda: None)
    assert as_bytes(blocks) == as_bytes(expected[2:])


def test_steps_between_the_layers_of_a_chunk_disturb_neither(make_runner, ids, read_document):
    runner, tokens, question = make_runner(KVType.K8V4), ids(400), ids(12, seed=3)
    document, _ = read_document(runner, tokens)
    other = ids(500, seed=8)
    _, expected_blocks = read_document(runner, other)
    slot = runner.new_tail()
    expected = torch.cat([runner.forward([Rows(slot, document, [t])])[0] for t in question])
    runner.truncate_tail(slot, 0)
    rest, got = list(question), []

    def step():
        got.append(runner.forward([Rows(slot, document, [rest.pop(0)])])[0])

    blocks = runner.prefill_chunk(runner.new_document(500), other, step)
    while rest:
        step()
    assert as_bytes(blocks) == as_bytes(expected_blocks)
    torch.testing.assert_close(torch.cat(got), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kv_type", list(KVType))
def test_kv_that_cannot_be_stored_is_an_error_and_leaves_no_trace(make_runner, ids, read_document, kv_type):
    runner, tokens = make_runner(kv_type, n_blocks=2), ids(300)
    qkv = runner._model.qkv

    def broken(layer, x):
        q, k, v = qkv(layer, x)
        if layer == 1:
            v[7, 0, 3] = float("nan")
        return q, k, v

    runner._model.qkv = broken
    document = runner.new_document(300)
    with pytest.raises(ValueError, match="NaN"):
        runner.prefill_chunk(document, tokens)
    assert document.n_tokens == 0
    runner._model.qkv = qkv
    blocks = runner.prefill_chunk(document, tokens[:20])
    assert as_bytes(blocks) == as_bytes(read_document(make_runner(kv_type), tokens[:20])[1])


def test_chunks_off_their_boundary_are_refused(make_runner, ids):
    runner = make_runner()
    document = runner.new_document(600)
    with pytest.raises(ValueError, match="cannot follow"):
        runner.prefill_chunk(document, ids(513))
    with pytest.raises(ValueError, match="cannot follow"):
        runner.prefill_chunk(document, [])
    runner.prefill_chunk(document, ids(100))
    with pytest.raises(ValueError, match="cannot follow"):
        runner.prefill_chunk(document, ids(100))
    small = runner.new_document(5)
    with pytest.raises(ValueError, match="do not fit a document of 5"):
        runner.prefill_chunk(small, ids(6))
    with pytest.raises(ValueError, match="are not blocks"):
        runner.load_blocks(small, 0, 3, memoryview(b""), 1)
    with pytest.raises(ValueError, match="bytes"):
        runner.load_blocks(small, 0, 0, memoryview(b"abc"), 5)


def test_its_fingerprint_tells_it_from_other_engines(make_runner, torch_runner):
    ours, theirs = make_runner(KVType.K8V4).fingerprint, torch_runner(KVType.K8V4).fingerprint
    assert ours.weights == theirs.weights
    assert ours.engine != theirs.engine
    assert ours.digest != make_runner(KVType.K8V4, chunk_tokens=1024).fingerprint.digest


@pytest.mark.parametrize("n_blocks", [1, 2, 24])
def test_warming_up_gives_back_all_it_takes(make_runner, ids, read_document, n_blocks):
    runner = make_runner(KVType.K8V4, n_blocks=n_blocks)
    warm_up(runner, runner._model)
    assert runner.pool.n_free == n_blocks
    assert runner.tails_used == 0
    tokens = ids(200)
    assert as_bytes(read_document(runner, tokens)[1]) == as_bytes(read_document(make_runner(KVType.K8V4), tokens)[1])


def test_the_context_is_no_longer_than_the_pool(make_runner):
    assert make_runner(n_blocks=3).limits.max_context == 768
    assert make_runner(n_blocks=24).limits.max_context == 4096


def test_only_the_first_card_is_used(tiny_dir):
    with pytest.raises(EngineRefused, match="CUDA_VISIBLE_DEVICES"):
        load_runner(tiny_dir, Options(KVType.FP16), "cuda:1")


def test_the_best_tokens_come_without_logits_where_nobody_asks_for_more(make_runner, ids, read_document):
    runner = make_runner(KVType.K8V4)
    document, _ = read_document(runner, ids(300))
    slots, rows = [runner.new_tail() for _ in range(2)], [ids(3, seed=3), ids(1, seed=4)]

    def step(*only_best):
        batch = [Rows(s, document, t, only_best=b) for s, t, b in zip(slots, rows, only_best, strict=True)]
        found = runner.forward(batch)
        for slot in slots:
            runner.truncate_tail(slot, 0)
        return found

    logits = step(False, False)
    assert all(torch.equal(a, b) for a, b in zip(step(True, False), logits, strict=True))
    best = step(True, True)
    assert [[(b.token_id, b.is_finite) for b in part] for part in best] == [
        [(int(row.argmax()), True) for row in part] for part in logits
    ]
    for slot in slots:
        runner.free_tail(slot)


def test_of_equally_good_tokens_the_first_is_best_and_one_that_is_no_number_is_told():
    logits = torch.zeros(3, 500)
    logits[0, [40, 77, 400]] = 2.0
    logits[1, 5], logits[2, 9] = torch.nan, torch.inf
    best = best_of(logits)
    assert best[0] == Best(40, True)
    assert [row.is_finite for row in best] == [True, False, False]
    assert best[0].sure == 0
    assert best_of(logits, how_sure=True)[0].sure == pytest.approx(float(logits[0].softmax(0).max()))
