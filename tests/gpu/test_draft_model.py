"""On the card: a draft model beside the model, as the service loads both. The demo model guesses for itself, by a twin
with a fingerprint of its own. `PREREAD_TEST_MODEL` may name any imported model of plain weights; without it the demo
model must be there."""

import gc

import pytest
import torch

from cache_store.layout import KVType
from service.engine.exl2_engine.loading import Options, load_runner
from service.engine.factory import EngineConfig, open_host
from service.engine.ledger import MemoryPlanRefused
from service.engine.models.gate import gate_text
from service.engine.protocol import Rows
from service.engine.tokenizer import Tokenizer
from tests.service.engine.draft_pair import Pair, make_guesses_free, read_ask_restart

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.timeout(300)]

DOCUMENT = 3000
MAX_TOKENS = 48
SAME = 0.1
"""Two tokens whose logits are so near may be told apart by rounding: FP16 sums in another order for more rows."""
QUESTIONS = ("\nOnce upon a time there was a", "\nDear friend, yesterday I", "\nThe history of bread begins with")
"""To be gone on with, at length and in words of its own."""


@pytest.fixture
def text(demo_model):
    ids = Tokenizer.load(demo_model).encode_plain(gate_text())
    return (ids * (DOCUMENT // len(ids) + 1))[:DOCUMENT]


@pytest.fixture
def pair(demo_model, text, tmp_path, monkeypatch):
    make_guesses_free(monkeypatch)
    config = {"engine": "exl2", "kv_type": "fp16", "tail_tokens": 512, "max_batch": 2, "host_budget_nbytes": 0}
    config |= {"gpu_pool_nbytes": 64 * 256 * 48 * 1024}
    yield Pair(tmp_path, demo_model, text, config)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def questions(demo_model):
    tokenizer = Tokenizer.load(demo_model)
    return [tokenizer.encode_plain(question) for question in QUESTIONS]


def two_best(demo_model, text, tokens):
    """By how much the likeliest token behind the document and `tokens` is ahead of the next, one row at a time."""
    runner = load_runner(demo_model, Options(KVType.FP16, n_slots=2, tail_tokens=512, pool_nbytes=1 << 30))
    with torch.inference_mode():
        document = runner.new_document(len(text))
        for first in range(0, len(text), runner.limits.chunk_tokens):
            runner.prefill_chunk(document, text[first : first + runner.limits.chunk_tokens])
        slot = runner.new_tail()
        best = runner.forward([Rows(slot, document, list(tokens), logits_from=len(tokens) - 1)])[0][0].topk(2).values
    return float(best[0] - best[1])


def test_answers_are_the_same_and_after_a_restart_neither_reads_the_document(pair, questions, demo_model, text):
    seen = read_ask_restart(pair, questions, MAX_TOKENS)
    stats, restarted = seen.stats, seen.restarted
    print(
        f"\nguessed {stats.draft_guessed_tokens_total}, right {stats.draft_accepted_tokens_total}, "
        f"{stats.draft_steps_total} steps of the draft model, {stats.steps_total} of the model for "
        f"{stats.decoded_tokens_total} tokens; after the restart {restarted.draft_guessed_tokens_total} guessed"
    )
    for one, other in zip(seen.without, seen.with_draft, strict=True):
        if one == other:
            continue
        same = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        gap = two_best(demo_model, text, one[:same])
        assert gap < SAME, f"token {same} of an answer differs, where the two likeliest are {gap:.3f} apart"
    assert stats.draft_guessed_tokens_total > 20
    assert stats.draft_accepted_tokens_total > 0.8 * stats.draft_guessed_tokens_total
    assert (stats.document_prefill_tokens_total, stats.draft_document_prefill_tokens_total) == (DOCUMENT, DOCUMENT)
    assert (restarted.document_prefill_tokens_total, restarted.draft_document_prefill_tokens_total) == (0, 0)
    assert restarted.draft_misses_total == 0
    assert restarted.draft_guessed_tokens_total > 0


def test_both_are_planned_and_captured_and_the_plan_holds(pair, questions):
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    with pair.host() as host:
        main, draft = host._context.runner, host._context.draft.context.runner
        assert (main.graphs.failure, draft.graphs.failure) == (None, None)
        assert main.pool.n_blocks == draft.pool.n_blocks > 0
        assert main.ledger is draft.ledger
        assert main.ledger.has_draft
        pair.build(host)
        pair.until(host, "draft_document_prefill_tokens_total", DOCUMENT)
        pair.until_followed(host, questions[0], MAX_TOKENS)
        replayed = draft.graphs.n_replayed
        pair.ask(host, questions[1], session="graphs", max_tokens=MAX_TOKENS)
        assert draft.graphs.n_replayed > replayed
        torch.cuda.synchronize()
        taken = before - torch.cuda.mem_get_info()[0]
        print(f"\nannounced {main.ledger.announced_nbytes / 2**30:.2f} GiB, taken {taken / 2**30:.2f} GiB")
        assert taken <= main.ledger.announced_nbytes


def test_a_card_that_is_too_small_for_both_is_refused_with_the_way_out(pair, tmp_path):
    free = torch.cuda.mem_get_info()[0]
    config = {
        "store_dir": str(tmp_path / "s"),
        "model_dir": str(pair.model_dir),
        "gpu_reserve_nbytes": free - (1 << 30),
    }
    with pytest.raises(MemoryPlanRefused, match="leave out the draft model"):
        open_host(EngineConfig(engine="exl2", kv_type="fp16", draft_model_dir=str(pair.draft_dir), **config))
