"""Speculation through the host: tokens are found whatever is in memory of them, and what is kept is the same."""

import msgspec
import pytest

from service.engine.drafts.planner import DraftPlanner
from service.engine.messages import DocumentRef
from tests.service.engine.host import test_several_documents as several
from tests.service.engine.host.host_copies import FakeCopies
from tests.service.engine.host.windowed import RETENTION
from tests.service.engine.host.windowed import TOKENS as LONG

QUOTE = list(LONG[400:430])
"""Tokens that are not in memory of the windowed document."""


class Free:
    def record(self, *_):
        pass

    def has_base(self, _):
        return True

    def ratio(self, *_):
        return 1.0


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """Rows cost nothing: whatever may be right is drafted."""
    before = DraftPlanner.__init__

    def init(self, *args):
        before(self, *args)
        self.costs = Free()

    monkeypatch.setattr(DraftPlanner, "__init__", init)


def test_a_session_is_the_same_with_drafts_and_without_and_after_a_restart(lab):
    told = []
    for draft_tokens, name in ((6, "with"), (0, "none")):
        ref = DocumentRef("own", f"doc-{name}")
        lab.start(script=lab.TOKENS[20:60], draft_tokens=draft_tokens)
        lab.build(ref=ref)
        first = lab.done(lab.ask(ref=ref, max_tokens=25, kv_id=name))
        second = lab.done(lab.follow(first, name, ref=ref, max_tokens=25, kv_id=f"{name}-b"))
        lab.start(script=lab.TOKENS[20:60], draft_tokens=draft_tokens)
        again = lab.follow(first, name, ref=ref, max_tokens=25, kv_id="", session="x")
        assert lab.started(again).miss_reason is None
        assert lab.done(again).token_ids == second.token_ids
        assert (first.steps < 12) == (first.accepted_tokens > 15) == bool(draft_tokens)
        told.append((first.token_ids, second.token_ids))
    assert told[0] == told[1]
    stored = {shard.parent.parent.name: shard.read_bytes() for shard in lab.shards("turns")}
    assert len(stored) == 4
    for name in ("", "-b"):  # which is all that differs
        assert stored[f"with{name}"].replace(b"with", b"none") == stored[f"none{name}"]


def test_the_places_are_counted_and_leave_with_the_document(lab):
    lab.start(script=lab.TOKENS[20:60], draft_tokens=6)
    lab.build()
    assert lab.host.stats().lookup_nbytes == pytest.approx(16 * len(lab.TOKENS), abs=128)
    assert lab.done(lab.ask(max_tokens=20)).accepted_tokens > 0
    stats = lab.host.stats()
    assert 0 < stats.accepted_tokens_total <= stats.drafted_tokens_total
    lab.host.release(lab.DOC)
    assert lab.host.stats().lookup_nbytes == 0


def test_without_speculation_nothing_is_looked_up(lab):
    lab.start(script=lab.TOKENS[20:60])
    lab.build()
    done = lab.done(lab.ask(max_tokens=20))
    assert (done.steps, done.drafted_tokens, done.accepted_tokens) == (20, 0, 0)
    assert lab.host.stats().lookup_nbytes == 0


def test_what_is_not_in_memory_of_a_windowed_document_is_quoted_too(lab):
    for _ in range(2):  # as it was built, and from disk
        lab.start(script=QUOTE, draft_tokens=6)
        lab.build(tokens=LONG, retention=RETENTION)
        done = lab.done(lab.ask(tokens=LONG, retention=RETENTION, max_tokens=25, kv_id=""))
        assert done.accepted_tokens > 15
        assert lab.host.stats().lookup_nbytes > 16 * len(LONG)
    lab.host.release(lab.DOC)
    assert lab.host.stats().lookup_nbytes == 0


def test_without_fetching_what_is_in_memory_of_a_windowed_document_is_quoted(lab):
    retention = msgspec.structs.replace(RETENTION, fetch_tokens=0)
    for _ in range(2):  # as it was built, and from disk
        lab.start(script=list(LONG[-30:]), draft_tokens=6)
        lab.build(tokens=LONG, retention=retention)
        assert lab.done(lab.ask(tokens=LONG, retention=retention, max_tokens=25, kv_id="")).accepted_tokens > 15


@pytest.mark.parametrize("document", range(3))
def test_of_several_documents_each_is_looked_through(lab, document):
    made = several.texts()
    lab.start(script=made[document][60:90], draft_tokens=6)
    several.build(lab, made)
    done = lab.done(several.ask(lab, several.parts_of(made), max_tokens=25))
    assert done.accepted_tokens > 15


def test_a_document_that_was_in_host_memory_is_looked_up_again(lab):
    def prepare(runner):
        runner.host_copies = FakeCopies(runner, 1 << 20)

    lab.start(script=lab.TOKENS[20:60], draft_tokens=6, prepare=prepare)
    budget = lab.runner.document_nbytes(len(lab.TOKENS) + 20)
    lab.host.close()
    lab.start(script=lab.TOKENS[20:60], draft_tokens=6, prepare=prepare, budget=budget)
    other = DocumentRef("own", "other")
    lab.build()
    lab.build(ref=other, name="c")
    of_both = pytest.approx(2 * 16 * len(lab.TOKENS), abs=256)
    assert lab.host.stats().lookup_nbytes == of_both  # one here, one in host memory
    events = lab.ask(max_tokens=20)
    assert lab.started(events).source == "host"
    assert lab.done(events).accepted_tokens > 10
    assert lab.host.stats().lookup_nbytes == of_both
    for ref in (lab.DOC, other):
        lab.host.release(ref)
    assert lab.host.stats().lookup_nbytes == 0


def test_the_session_itself_is_quoted(lab):
    said = list(range(252, 292))
    lab.start(script=said[4:30], draft_tokens=6)
    lab.build()
    done = lab.done(lab.ask(said, max_tokens=20))
    assert done.accepted_tokens > 10
