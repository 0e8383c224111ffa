"""A draft model through the torch engine: a tiny model guesses for itself, and another for it, from another KV type."""

import time

import pytest

from cache_store.layout import KVType
from cache_store.store import SnapshotStore
from service.engine.digests import digest_of
from service.engine.drafts.planner import DraftPlanner
from service.engine.fake_runner import ByteDecoder
from service.engine.host.host import EngineHost
from service.engine.messages import AnswerDone, AnswerRequest, BuildDone, BuildRequest, DocumentRef, Sampling, TurnRef
from tests.service.engine.draft_runner import Costs

DOC = DocumentRef("own", "doc")
N_TOKENS = 600


@pytest.fixture
def start(load_runner, tmp_path, monkeypatch):
    """A host over the tiny model; each loads the model anew, as a process does."""
    before, hosts = DraftPlanner.__init__, []

    def init(self, *args):
        before(self, *args)
        self.costs = Costs()

    monkeypatch.setattr(DraftPlanner, "__init__", init)

    def make(*, drafts=True):
        number = len(hosts)  # a scheduler's thread makes tails in inference mode: no runner is used twice
        runner = load_runner(KVType.K8V4, n_slots=4, tail_tokens=256 + number)
        draft = load_runner(KVType.FP16, n_slots=3, tail_tokens=256 + number) if drafts else None
        store = SnapshotStore(tmp_path / "store", free_floor_nbytes=0)
        hosts.append(
            EngineHost(
                runner, store, ByteDecoder(), frozenset(), resident_budget_nbytes=1 << 26, max_batch=2, draft=draft
            )
        )
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def ask(host, tokens, prompt, turns=(), kv_id="", session="s", **sampling) -> AnswerDone:
    events: list = []
    settings = Sampling(30, **sampling)
    request = AnswerRequest("a", session, DOC, digest_of(tokens), len(tokens), list(turns), prompt, settings, kv_id)
    host.answer(request, events.append).result(60)
    assert isinstance(events[-1], AnswerDone), events[-1]
    return events[-1]


def read(host, tokens):
    events: list = []
    host.build(BuildRequest("b", DOC, tokens), events.append).result(60)
    assert isinstance(events[-1], BuildDone), events[-1]
    end = time.monotonic() + 60
    while host.stats().draft_documents < 1 or host._context.draft._reading._open:
        assert time.monotonic() < end
        time.sleep(0.01)


def session(host, tokens, name):
    first = ask(host, tokens, [5, 6, 7], kv_id=name, session=name)
    turns = [TurnRef(name, first.token_ids)]
    second = ask(host, tokens, [*first.pending_ids, 8, 9], turns, session=name)
    sampled = ask(host, tokens, [11, 12], session=f"{name}-sampled", temperature=1.0, seed=3)
    return [first.token_ids, second.token_ids, sampled.token_ids], [first, second, sampled]


def test_answers_are_the_same_and_after_a_restart_neither_model_reads_the_document(start, token_ids):
    tokens = token_ids(N_TOKENS)
    host = start()
    read(host, tokens)
    assert host.stats().draft_document_prefill_tokens_total == N_TOKENS
    told, _ = session(host, tokens, "k1")
    host.close()
    plain, _ = session(start(drafts=False), tokens, "k2")
    host = start()
    again, answers = session(host, tokens, "k3")
    assert told == plain == again
    stats = host.stats()
    assert (stats.document_prefill_tokens_total, stats.draft_document_prefill_tokens_total) == (0, 0)
    assert stats.draft_misses_total == 0
    for greedy in answers[:2]:
        assert greedy.accepted_tokens > 8  # with random weights it is never sure, and the two KV types are not the same
        assert greedy.steps < 22
