import pytest
import torch

from cache_store.layout import KVType
from service.engine.protocol import Rows
from tests.service.engine.runner_parts import ask, load_layerwise, log_probs


def mean_kl(reference, logits):
    p, q = log_probs(reference), log_probs(logits)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("n_document", [1, 255, 256, 257, 700, 1100])
@pytest.mark.parametrize("n_question", [1, 5, 40])
def test_fp16_kv_agrees_with_stock_transformers(load_runner, stock, token_ids, prefill, n_document, n_question):
    tokens, question = token_ids(n_document), token_ids(n_question, seed=1)
    document, _ = prefill(load_runner(), tokens)
    logits = ask(load_runner(), document, tokens, question)
    with torch.inference_mode():
        reference = stock(torch.tensor([tokens + question])).logits[0, n_document - 1 :]
    assert mean_kl(reference, logits) < 1e-5
    assert torch.equal(reference.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("kv_type", list(KVType))
def test_a_restored_document_is_the_computed_one(load_runner, token_ids, prefill, kv_type):
    runner, tokens = load_runner(kv_type), token_ids(1100)
    document, blocks = prefill(runner, tokens)
    assert [len(b) for b in blocks] == [3] * 5
    restored = load_layerwise(runner, blocks, len(tokens))
    n = len(tokens)
    assert torch.equal(document.k[:, :, :n], restored.k[:, :, :n])
    assert torch.equal(document.v[:, :, :n], restored.v[:, :, :n])
    question = token_ids(7, seed=2)
    assert torch.equal(ask(runner, document, tokens, question), ask(runner, restored, tokens, question))


def test_a_prefill_resumed_at_a_chunk_boundary_gives_the_same_bytes(load_runner, token_ids, prefill):
    runner, tokens = load_runner(KVType.K8V4), token_ids(1300)
    _, blocks = prefill(runner, tokens)
    document = runner.new_document(len(tokens))
    for layer in range(3):
        records = bytearray().join(block[layer] for block in blocks[:4])
        runner.load_blocks(document, layer, 0, memoryview(records), 1024)
    runner.finish_load(document, 1024)
    rest = runner.prefill_chunk(document, tokens[1024:])
    assert [bytes(r) for b in rest for r in b] == [bytes(r) for b in blocks[4:] for r in b]


@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V4])
def test_sequences_in_one_forward_get_what_they_get_alone(load_runner, token_ids, prefill, kv_type):
    runner = load_runner(kv_type)
    texts = [token_ids(300, seed=3), token_ids(520, seed=4)]
    documents = [prefill(runner, text)[0] for text in texts]
    jobs = [(0, 4), (1, 9), (0, 1), (1, 30)]
    questions = [token_ids(n, seed=10 + i) for i, (_, n) in enumerate(jobs)]
    alone = [ask(runner, documents[d], texts[d], q) for (d, _), q in zip(jobs, questions, strict=True)]
    slots = [runner.new_tail() for _ in jobs]
    together = runner.forward(
        [
            Rows(slot, documents[d], [texts[d][-1], *q], refeed=True)
            for slot, (d, _), q in zip(slots, jobs, questions, strict=True)
        ]
    )
    for one, batched in zip(alone, together, strict=True):
        torch.testing.assert_close(one, batched, rtol=0, atol=2e-4)
    for slot in slots:
        runner.free_tail(slot)


def test_one_token_at_a_time_equals_all_at_once(load_runner, token_ids, prefill):
    runner, tokens, question = load_runner(KVType.K8V8), token_ids(400), token_ids(20, seed=5)
    document, _ = prefill(runner, tokens)
    whole = ask(runner, document, tokens, question)[1:]
    slot = runner.new_tail()
    steps = [runner.forward([Rows(slot, document, [t])])[0] for t in question]
    assert runner.tail_length(slot) == len(question)
    runner.free_tail(slot)
    torch.testing.assert_close(whole, torch.cat(steps), rtol=0, atol=2e-4)


def test_an_exported_tail_goes_on_like_an_imported_one(load_runner, token_ids, prefill):
    runner, tokens = load_runner(KVType.K4V4), token_ids(300)
    document, _ = prefill(runner, tokens)
    turn, question = token_ids(50, seed=6), token_ids(6, seed=7)
    slots = [runner.new_tail(), runner.new_tail()]
    runner.forward([Rows(slots[0], document, turn)])
    blocks = runner.export_tail(slots[0], 0, 50)
    runner.import_tail(slots[1], blocks, 50)
    kept, stored = (runner.forward([Rows(s, document, question)])[0] for s in slots)
    assert torch.equal(kept, stored)
    for slot in slots:
        runner.free_tail(slot)


def test_a_cancelled_chunk_leaves_the_document_as_it_was(load_runner, token_ids):
    class Cancelled(Exception):
        pass

    runner, tokens = load_runner(), token_ids(600)
    document = runner.new_document(600)
    runner.prefill_chunk(document, tokens[:512])

    def cancel():
        raise Cancelled

    with pytest.raises(Cancelled):
        runner.prefill_chunk(document, tokens[512:], between_layers=cancel)
    assert document.n_tokens == 512
    runner.prefill_chunk(document, tokens[512:])
    assert document.n_tokens == 600


def test_a_step_between_the_layers_of_a_chunk_disturbs_neither(load_runner, token_ids, prefill):
    runner, tokens = load_runner(KVType.K8V4), token_ids(500)
    other, text = prefill(runner, token_ids(300, seed=8))[0], token_ids(300, seed=8)
    question = token_ids(5, seed=9)
    expected, (_, plain) = ask(runner, other, text, question), prefill(runner, tokens)
    seen = []
    document = runner.new_document(500)
    blocks = runner.prefill_chunk(document, tokens, lambda: seen.append(ask(runner, other, text, question)))
    assert len(seen) == runner.layout.n_layers - 1
    assert all(torch.equal(expected, logits) for logits in seen)
    assert [bytes(r) for b in blocks for r in b] == [bytes(r) for b in plain for r in b]


def test_without_a_document_the_tail_is_all(load_runner, stock, token_ids):
    runner, tokens = load_runner(), token_ids(30)
    slot = runner.new_tail()
    first = runner.forward([Rows(slot, None, tokens[:20])])[0]
    second = runner.forward([Rows(slot, None, tokens[20:])])[0]
    runner.free_tail(slot)
    with torch.inference_mode():
        reference = stock(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(reference, torch.cat((first, second)), rtol=0, atol=2e-3)


def test_a_lost_causal_mask_would_be_seen(load_runner, stock, token_ids, prefill, monkeypatch):
    """The planted fault: a chunk that attends to all of itself must fail the parity that the tests above hold."""
    from service.engine.torch_engine import attention

    honest = attention.flash
    monkeypatch.setattr(attention, "flash", lambda q, k, v, scale, causal=False: honest(q, k, v, scale, causal=False))
    tokens, question = token_ids(300), token_ids(5, seed=1)
    document, _ = prefill(load_runner(), tokens)
    logits = ask(load_runner(), document, tokens, question)
    with torch.inference_mode():
        reference = stock(torch.tensor([tokens + question])).logits[0, 299:]
    assert mean_kl(reference, logits) > 1e-3


@pytest.mark.parametrize("wrong", [[5] * 513, []], ids=["too long", "empty"])
def test_chunks_off_the_fixed_boundaries_are_refused(load_runner, wrong):
    document = load_runner().new_document(600)
    with pytest.raises(ValueError, match="chunk"):
        load_runner().prefill_chunk(document, wrong)


def test_rows_beyond_a_tails_room_are_refused_and_change_nothing(load_runner, token_ids, prefill):
    runner, tokens = load_runner(), token_ids(20)
    document, _ = prefill(runner, tokens)
    slot = runner.new_tail()
    runner.forward([Rows(slot, document, token_ids(200))])
    with pytest.raises(ValueError, match="fit"):
        runner.forward([Rows(slot, document, token_ids(100))])
    assert runner.tail_length(slot) == 200
    runner.free_tail(slot)


def test_slots_are_counted_and_never_freed_twice(load_runner):
    runner = load_runner(n_slots=2)
    slots = [runner.new_tail(), runner.new_tail()]
    with pytest.raises(RuntimeError, match="no free slot"):
        runner.new_tail()
    runner.free_tail(slots[0])
    with pytest.raises(RuntimeError, match="twice"):
        runner.free_tail(slots[0])
    runner.free_tail(slots[1])
    assert runner.tails_used == 0


def test_bfloat16_stays_close_to_float32(load_runner, token_ids, prefill):
    tokens, question = token_ids(600), token_ids(12, seed=1)
    logits = []
    for compute_dtype in ("float32", "bfloat16"):
        runner = load_runner(KVType.K8V4, compute_dtype)
        document, _ = prefill(runner, tokens)
        logits.append(ask(runner, document, tokens, question))
    assert mean_kl(*logits) < 0.05


def test_a_fingerprint_names_what_changes_the_bytes(load_runner):
    base = load_runner(KVType.K8V4).fingerprint
    assert base.differences(load_runner(KVType.K8V8).fingerprint) == ("kv",)
    assert base.differences(load_runner(KVType.K8V4, "bfloat16").fingerprint) == ("compute_dtype",)
    assert base.differences(load_runner(KVType.K8V4, chunk_tokens=768).fingerprint) == ("chunking",)
