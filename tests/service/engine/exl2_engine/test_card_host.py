"""Builds and answers of a whole engine over the card runner, on a CPU: a pool smaller than the documents together."""

import pytest

from cache_store.layout import KVType
from cache_store.store import SnapshotStore
from service.engine.digests import digest_of
from service.engine.host.host import EngineHost
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    BuildDone,
    BuildRequest,
    DocumentRef,
    Failed,
    Sampling,
)


class Words:
    def decode(self, ids):
        return "".join(f"<{i}>" for i in ids)


@pytest.fixture
def start(make_runner, tmp_path):
    hosts = []

    def run(n_blocks):
        runner = make_runner(KVType.K8V4, n_blocks=n_blocks, n_slots=3)
        store = SnapshotStore(tmp_path, budget_nbytes=None, free_floor_nbytes=0)
        budget = runner.pool.nbytes
        hosts.append(EngineHost(runner, store, Words(), frozenset(), resident_budget_nbytes=budget, engine="exl2"))
        return runner, hosts[-1]

    yield run
    for host in hosts:
        host.close()


def ref(i):
    return DocumentRef("own", f"doc-{i}")


def build(host, i, tokens):
    events = []
    host.build(BuildRequest(f"b{i}", ref(i), tokens), events.append).result(60)
    return events[-1]


def ask(host, i, tokens, question, session="s"):
    events = []
    request = AnswerRequest(
        request_id=f"a{i}",
        session_id=session,
        document=ref(i),
        token_digest=digest_of(tokens),
        n_document_tokens=len(tokens),
        turns=[],
        prompt_ids=question,
        sampling=Sampling(max_tokens=6, temperature=0.0),
        kv_id="",
    )
    host.answer(request, events.append).result(60)
    return events


def test_more_documents_than_the_pool_holds_take_turns(start, ids):
    runner, host = start(n_blocks=7)
    texts = [ids(n, seed=i) for i, n in enumerate((300, 513, 900, 256, 257, 1100))]
    for i, text in enumerate(texts):
        assert isinstance(build(host, i, text), BuildDone)
    first = {}
    for turn in range(2):
        for i, text in enumerate(texts):
            events = ask(host, i, text, ids(5, seed=40), session=f"{turn}-{i}")
            assert isinstance(events[0], AnswerStarted)
            assert isinstance(events[-1], AnswerDone), events[-1]
            answer = events[-1].token_ids
            assert first.setdefault(i, answer) == answer
    stats = host.stats()
    assert stats.resident_nbytes == runner.pool.nbytes - runner.pool.n_free * runner.pool.block_nbytes
    assert runner.pool.n_free + sum(-(-len(t) // 256) for t in texts[5:]) <= 7
    for i in range(len(texts)):
        host.release(ref(i))
    host.check()
    assert runner.pool.n_free == 7


def test_another_process_answers_the_same_from_the_snapshot(start, ids):
    text, question = ids(700), ids(9, seed=2)
    _, host = start(n_blocks=8)
    build(host, 0, text)
    expected = ask(host, 0, text, question)[-1].token_ids
    _, other = start(n_blocks=8)
    events = ask(other, 0, text, question)
    assert events[0].source == "disk"
    assert events[-1].token_ids == expected


def test_a_document_larger_than_the_pool_is_refused_with_its_size(start, ids):
    _, host = start(n_blocks=2)
    failed = build(host, 0, ids(513))
    assert isinstance(failed, Failed)
    assert failed.code == "too_long"
    assert "513 tokens" in failed.detail
