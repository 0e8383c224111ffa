"""A draft model on the card's engine, on a CPU: both are loaded as the service loads them, with pools of as many
tokens, and an answer is the same with it and without, before a restart and after."""

from dataclasses import replace

import pytest

from cache_store.layout import KVType
from service.engine.exl2_engine.pool import block_nbytes
from service.engine.models.card import load_card
from tests.service.engine.draft_pair import DOC, Pair, make_guesses_free, read_ask_restart

BLOCKS = 12


@pytest.fixture
def pair(tiny_dir, tmp_path, ids, monkeypatch):
    make_guesses_free(monkeypatch)
    config = {"engine": "exl2", "device": "cpu", "kv_type": "k8v4", "tail_tokens": 256, "max_batch": 2}
    block = block_nbytes(load_card(tiny_dir).layout(KVType.K8V4))
    config |= {"resident_budget_nbytes": BLOCKS * block, "threads": 1}
    return Pair(tmp_path, tiny_dir, ids(1100), config)


def test_answers_are_the_same_with_it_and_after_a_restart_nothing_is_read_again(pair, ids):
    seen = read_ask_restart(pair, [ids(9, seed=i) for i in (1, 2)], max_tokens=24)
    assert seen.with_draft == seen.without
    assert seen.resumed == seen.first_resumed
    assert seen.stats.draft_guessed_tokens_total > 20
    assert seen.stats.draft_accepted_tokens_total > 0.8 * seen.stats.draft_guessed_tokens_total
    assert (seen.stats.document_prefill_tokens_total, seen.stats.draft_document_prefill_tokens_total) == (1100, 1100)
    assert seen.stats.draft_misses_total == 0
    restarted = seen.restarted
    assert (restarted.document_prefill_tokens_total, restarted.draft_document_prefill_tokens_total) == (0, 0)
    assert (restarted.draft_misses_total, restarted.draft_documents) == (0, 1)
    assert restarted.draft_guessed_tokens_total > 0


def test_the_draft_models_pool_holds_as_many_tokens_and_it_computes_nothing_more(pair):
    with pair.host() as host:
        main, draft = host._context.runner, host._context.draft.context.runner
        assert host.info.draft_model == draft.name == "twin"
        assert (main.pool.n_blocks, draft.pool.n_blocks) == (BLOCKS, BLOCKS)
        assert (draft.limits.n_slots, draft.watched_heads, draft.host_copies) == (3, (), None)
        assert main.limits.draft_tokens > 0
        assert main.fingerprint != draft.fingerprint
        assert main.fingerprint == replace(draft.fingerprint, weights=main.fingerprint.weights)


def test_without_guesses_it_is_not_loaded(pair):
    with pair.host(speculation="off") as host:
        assert host.info.draft_model == ""
        assert host._context.draft is None


def test_a_document_that_is_deleted_leaves_nothing_of_either(pair):
    with pair.host() as host:
        pair.build(host)
        pair.until(host, "draft_document_prefill_tokens_total", len(pair.tokens))
        pair.until(host, "draft_documents", 1)
        assert host.release(DOC).objects == 2
        assert (host.stats().resident_documents, host.stats().draft_documents) == (0, 0)
        assert host.stats().draft_nbytes == 0
