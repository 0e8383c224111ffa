"""A draft model through the host: a snapshot of its own beside the main one, and the answers are those without it."""

import pytest

from service.engine.drafts.costs import StepCosts
from service.engine.messages import DocumentRef
from tests.service.engine.draft_runner import Successor
from tests.service.engine.host import test_several_documents as several
from tests.service.engine.host.draft_host import KEY, SAID, answer, drafts, plain, settled, start, until
from tests.service.engine.host.windowed import RETENTION
from tests.service.engine.host.windowed import TOKENS as LONG

pytestmark = pytest.mark.usefixtures("free_drafts", "waiting")


def test_both_snapshots_are_made_and_after_a_restart_no_document_token_is_read_again(lab):
    expected = plain(lab)
    draft = start(lab)
    assert lab.done_build(lab.build()).already
    settled(lab)
    stats = lab.host.stats()
    assert (stats.document_prefill_tokens_total, stats.draft_document_prefill_tokens_total) == (0, len(lab.TOKENS))
    assert [(name.key, name.fingerprint_digest) for name in drafts(lab)] == [(KEY, draft.fingerprint.digest)]
    start(lab)
    done = answer(lab)
    stats = lab.host.stats()
    assert (done.token_ids, done.finish_reason) == (expected.token_ids, expected.finish_reason)
    assert (stats.document_prefill_tokens_total, stats.draft_document_prefill_tokens_total) == (0, 0)
    assert (stats.draft_misses_total, stats.draft_documents) == (0, 1)
    assert stats.draft_accepted_tokens_total == done.accepted_tokens > 30
    assert done.steps < 30
    assert stats.draft_prefilled_tokens_total >= 3  # the question


def test_a_session_goes_on_in_its_tail_and_only_what_is_new_is_fed(lab):
    draft = start(lab)
    lab.build()
    settled(lab)
    first = lab.done(lab.ask(max_tokens=30, kv_id="k1"))
    n_fed = lab.host.stats().draft_prefilled_tokens_total
    second = lab.done(lab.follow(first, "k1", max_tokens=30, kv_id=""))
    assert second.accepted_tokens > 10
    assert 0 < lab.host.stats().draft_prefilled_tokens_total - n_fed <= 12
    assert draft.n_tails == 2  # one is for probes
    lab.host.release_session("s")
    until(lambda: draft.n_tails == 1)


def test_wrong_guesses_change_nothing_and_are_given_up(lab):
    wrong = [token if i % 2 else 400 for i, token in enumerate(SAID)]
    start(lab, wrong)
    lab.build()
    settled(lab)
    done = answer(lab)
    assert done.token_ids[3:] == SAID[:59]
    assert done.drafted_tokens > done.accepted_tokens


def test_several_answers_at_once_are_guessed_in_one_forward_for_each_place(lab):
    draft = start(lab, n_slots=8, draft_options={"n_slots": 8})
    lab.build()
    settled(lab)
    asked = [lab.ask_later(max_tokens=70, kv_id="", session=f"s{i}", name=f"a{i}") for i in range(3)]
    for events, future in asked:
        future.result(60)
        assert lab.done(events).token_ids[3:] == SAID[:69]
    assert any(len(batch) == 3 for batch in draft.forwards)
    assert lab.host.stats().draft_accepted_tokens_total > 60


def test_a_sampled_answer_with_a_seed_is_the_same(lab):
    told = []
    for guesses in (SAID, None):
        if guesses:
            start(lab, guesses, script=(), draft_options={"sure": 0.0})
        else:
            lab.start()
        lab.build()
        if guesses:
            settled(lab)
        done = answer(lab, temperature=1.0, seed=5)
        told.append((done.token_ids, done.finish_reason))
    assert told[0] == told[1]


def test_a_windowed_document_is_guessed_from_all_of_its_tokens(lab):
    more = {"tokens": LONG, "retention": RETENTION}
    expected = plain(lab, **more)
    start(lab)
    lab.build(**more)
    settled(lab)
    assert lab.host.stats().draft_document_prefill_tokens_total == len(LONG)
    start(lab)
    done = answer(lab, **more)
    assert done.token_ids == expected.token_ids
    assert done.accepted_tokens > 20
    lab.store.delete(KEY)
    start(lab)
    assert answer(lab, **more).token_ids == expected.token_ids
    settled(lab)  # read again from the snapshot of all its tokens
    assert lab.host.stats().draft_document_prefill_tokens_total == len(LONG)


def test_a_document_too_long_for_the_draft_model_and_several_together_go_without(lab):
    draft = start(lab, draft_options={"max_context": 90})
    lab.build()
    assert answer(lab).token_ids[3:] == SAID[:59]
    assert (drafts(lab), lab.host.stats().draft_misses_total) == ([], 0)
    start(lab, draft_budget=draft.document_nbytes(90))
    assert answer(lab).token_ids[3:] == SAID[:59]
    assert drafts(lab) == []
    made = several.texts()
    draft = start(lab)
    several.build(lab, made)
    settled(lab)
    assert lab.done(several.ask(lab, several.parts_of(made), max_tokens=25)).finish_reason == "length"
    assert len(drafts(lab)) == len(made)


def test_documents_leave_the_draft_models_memory_for_others(lab):
    draft = start(lab, draft_budget=Successor().document_nbytes(160))
    for name in ("doc", "other"):
        lab.build(ref=DocumentRef("own", name), name=name)
        settled(lab)
    assert (lab.host.stats().draft_documents, draft.n_documents) == (1, 1)
    for name in ("doc", "other"):
        assert answer(lab, ref=DocumentRef("own", name)).accepted_tokens > 10
    stats = lab.host.stats()
    assert (stats.draft_misses_total, stats.draft_documents) == (0, 1)


def test_a_snapshot_counts_as_used_by_each_answer_also_in_memory(lab):
    start(lab)
    lab.build()
    settled(lab)
    [name] = drafts(lab)
    uses = []
    for _ in range(3):
        answer(lab)
        uses.append(lab.store.marks.use_of(name).n)
    assert uses == [uses[0], uses[0] + 1, uses[0] + 2]


def test_without_speculation_a_draft_model_is_left_alone(lab):
    draft = start(lab, draft_tokens=0)
    lab.build()
    assert answer(lab).token_ids[3:] == SAID[:59]
    assert (draft.n_documents, draft.forwards, drafts(lab)) == (0, [], [])


def test_quotes_of_the_document_are_looked_up_and_not_asked_for(lab):
    start(lab, list(range(400, 480)), script=[*lab.TOKENS[20:90], *SAID])
    lab.build()
    settled(lab)
    done = answer(lab, max_tokens=70)
    assert done.token_ids[3:] == lab.TOKENS[20:89]
    assert done.accepted_tokens > 30
    assert lab.host.stats().draft_accepted_tokens_total == 0
    assert lab.host.stats().draft_steps_total < 20


def test_a_draft_model_that_takes_longer_than_the_main_one_is_left_out(lab):
    draft = start(lab, step_delay_s=0.004, draft_options={"step_delay_s": 0.02})
    lab.host._context.scheduler.planner.costs = StepCosts()
    lab.build()
    settled(lab)
    done = answer(lab, max_tokens=70)
    assert done.token_ids[3:] == SAID[:69]
    n_asked = len(draft.forwards)
    assert 4 <= n_asked < 25
    assert answer(lab, max_tokens=70).token_ids == done.token_ids
    assert len(draft.forwards) - n_asked < 10
