"""Windowed documents through the whole engine over the card's runner, on a CPU: a pool that holds no whole document."""

import threading

import pytest

from cache_store.keys import SnapshotKey
from cache_store.layout import KVType
from cache_store.segments import Segments
from cache_store.store import SnapshotStore
from service.engine.digests import digest_of
from service.engine.host.host import EngineHost
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    BuildDone,
    BuildProgress,
    BuildRequest,
    DocumentRef,
    Retention,
    Sampling,
    TurnRef,
)
from service.engine.scheduler.cancel import Reason
from tests.service.engine.windowed_host import Words

N_TOKENS = 2500
RETENTION = Retention(256, 0, 300, segment_tokens=1024, fetch_tokens=96)
N_ROWS = 556
A, B = DocumentRef("own", "a"), DocumentRef("own", "b")
HEADS = [(1, 1), (2, 0)]


class Engine:
    """A pool of 6 blocks: a segment behind its sinks takes 5, what is resident of a document 3."""

    def __init__(self, runner, root, n_host: int = 0) -> None:
        self.runner, self.store = runner, SnapshotStore(root)
        if n_host:
            runner.keep_in_host_memory(n_host * runner.document_nbytes(N_ROWS))
            runner.host_copies._memory.wait_allocated()
        self.host = EngineHost(
            runner,
            self.store,
            Words(),
            frozenset(),
            resident_budget_nbytes=runner.pool.nbytes,
            engine="exl2",
            index_heads=HEADS,
            replay_ids=[5, 6, 7],
        )

    def build(self, ref, tokens, on_progress=lambda event: None):
        events: list = []

        def emit(event) -> None:
            events.append(event)
            if isinstance(event, BuildProgress):
                on_progress(event)

        self.host.build(BuildRequest("b", ref, tokens, RETENTION), emit).result(120)
        return events[-1]

    def ask(self, ref, tokens, prompt, turns=(), kv_id="", session="s") -> tuple[AnswerStarted, AnswerDone]:
        events: list = []
        request = AnswerRequest(
            "q", session, ref, digest_of(tokens), len(tokens), list(turns), prompt, Sampling(5), kv_id, False, RETENTION
        )
        self.host.answer(request, events.append).result(120)
        assert isinstance(events[-1], AnswerDone), events[-1]
        return events[0], events[-1]

    def cold(self, ref):
        """All records of a document's cold snapshot."""
        runner, key = self.runner, SnapshotKey(ref.owner_id, "document", ref.document_id)
        with self.store.open(key, runner.fingerprint, runner.layout, segments=Segments(1024, 256)) as reader:
            return [bytes(r) for layer in range(3) for _, _, r, _ in reader.read_layer(layer)]


@pytest.fixture
def start(make_runner, tmp_path):
    engines = []

    def run(name="store", kv_type=KVType.K8V4, **more) -> Engine:
        engines.append(Engine(make_runner(kv_type, n_blocks=6, n_slots=3), tmp_path / name, **more))
        return engines[-1]

    yield run
    for engine in engines:
        engine.host.close()


@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V4])
def test_answers_are_the_same_after_a_restart(start, ids, kv_type):
    tokens, first, second = ids(N_TOKENS), ids(8, seed=1), ids(7, seed=2)
    one = start(kv_type=kv_type)
    done = one.build(A, tokens)
    assert isinstance(done, BuildDone), done
    assert (done.prefilled_tokens, done.resident_tokens) == (N_TOKENS, N_ROWS)
    started, answer = one.ask(A, tokens, first, kv_id="k1")
    assert started.spans
    assert 0 < sum(span.n_tokens for span in started.spans) <= 96
    assert (started.first_pass_tokens, started.prefilled_tokens) == (8, 8)
    turns = [TurnRef("k1", answer.token_ids, started.spans)]
    prompt = [*answer.pending_ids, *second]
    expected = one.ask(A, tokens, prompt, turns)
    one.host.close()
    two = start(kv_type=kv_type)
    again = two.ask(A, tokens, first, session="other")
    assert again[0].source == "disk"
    assert again[0].spans == started.spans
    assert again[1].token_ids == answer.token_ids
    followed = two.ask(A, tokens, prompt, turns, session="third")
    assert followed[0].spans == expected[0].spans
    assert followed[1].token_ids == expected[1].token_ids
    assert two.host.stats().document_prefill_tokens_total == 0
    assert two.runner.pool.n_free == 3


def test_what_is_resident_leaves_the_card_and_comes_back(start, ids):
    engine, texts, question = start(n_host=1), {A: ids(N_TOKENS), B: ids(N_TOKENS, seed=1)}, ids(8, seed=2)
    for ref, tokens in texts.items():
        assert isinstance(engine.build(ref, tokens), BuildDone)
    right = {ref: engine.ask(ref, tokens, question, session=ref.document_id)[1] for ref, tokens in texts.items()}
    sources = set()
    for i in range(3):
        assert isinstance(engine.build(DocumentRef("own", f"c{i}"), ids(N_TOKENS, seed=5 + i)), BuildDone)
        for ref, tokens in texts.items():
            started, answer = engine.ask(ref, tokens, question, session=f"{ref.document_id}{i}")
            sources.add(started.source)
            assert answer.token_ids == right[ref].token_ids
    assert sources == {"host", "disk"}


def test_a_build_that_was_interrupted_gives_the_same_bytes(start, ids):
    tokens = ids(N_TOKENS)
    whole = start("whole")
    assert isinstance(whole.build(A, tokens), BuildDone)
    engine, stopped = start("parts"), threading.Event()

    def stop(event) -> None:
        if event.done >= 1700 and event.stage == "prefilling" and not stopped.is_set():
            stopped.set()
            engine.host.cancel("b", Reason.DRAIN)

    assert engine.build(A, tokens, stop).code == "cancelled"
    engine.host._context.scheduler.run(lambda: None)  # memory is given back behind what was asked before
    assert engine.runner.pool.n_free == 6
    engine.host.close()
    again = start("parts")
    done = again.build(A, tokens)
    assert isinstance(done, BuildDone), done
    assert 1024 < done.resumed_tokens < N_TOKENS
    assert done.resumed_tokens + done.prefilled_tokens == N_TOKENS
    assert again.cold(A) == whole.cold(A)
    question = ids(8, seed=1)
    assert again.ask(A, tokens, question)[1].token_ids == whole.ask(A, tokens, question)[1].token_ids
