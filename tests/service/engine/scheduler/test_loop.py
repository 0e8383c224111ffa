"""The engine's thread over a runner without a model."""

import random
import threading
import time
from concurrent.futures import Future

import pytest

from service.engine.fake_runner import FakeRunner
from service.engine.messages import Sampling
from service.engine.scheduler.batching import compose
from service.engine.scheduler.chunks import ChunkCancelled
from service.engine.scheduler.errors import SchedulerClosed
from service.engine.scheduler.loop import Scheduler
from service.engine.scheduler.sampling import NotFinite, Sampler
from service.engine.scheduler.sequence import Sequence

TOKENS = [7 * i % 251 for i in range(64)]


class Bench:
    """A scheduler with one document in place."""

    def __init__(self, **more) -> None:
        more.setdefault("chunk_tokens", 16)
        self.runner = FakeRunner(block_tokens=8, **more)
        self.scheduler = Scheduler(self.runner, prefill_rows=8)
        self.document = self.scheduler.run(self.runner.new_document, len(TOKENS))
        for first in range(0, len(TOKENS), 16):
            self.scheduler.prefill(self.document, TOKENS[first : first + 16]).result()
        self.runner.forwards.clear()

    def ask(self, prompt=(1, 2, 3), max_new=5, **more) -> Sequence:
        slot = self.scheduler.run(self.runner.new_tail)
        sampler = Sampler(more.pop("sampling", Sampling()))
        tokens = [TOKENS[-1], *prompt]
        sequence = Sequence(slot, self.document, tokens, True, max_new, sampler, **more)
        self.scheduler.submit(sequence)
        return sequence

    def result(self, sequence: Sequence):
        result = sequence.done.result(60)
        self.scheduler.run(self.runner.free_tail, sequence.slot)
        return result


@pytest.fixture
def bench():
    made = []

    def make(**more) -> Bench:
        made.append(Bench(**more))
        return made[-1]

    yield make
    for one in made:
        one.scheduler.close()


def test_a_sequence_ends_at_its_length_and_says_what_it_computed(bench):
    b = bench()
    result = b.result(b.ask([1, 2, 3], 5))
    assert result.finish_reason == "length"
    assert result.computed_ids == [1, 2, 3, *result.sampled_ids[:4]]
    assert (result.n_prefilled, len(result.sampled_ids)) == (3, 5)
    assert b.scheduler.counters.decoded_tokens == 5
    assert b.scheduler.counters.prefilled_tokens == len(TOKENS) + 3


def test_an_end_token_ends_it(bench):
    b = bench(script=[9, 8, 7])
    result = b.result(b.ask(end_ids=frozenset([7])))
    assert (result.finish_reason, result.sampled_ids) == ("stop", [9, 8, 7])


def test_long_prompts_are_fed_in_chunks_with_the_same_result(bench):
    b = bench()
    prompt = list(range(100, 121))
    result = b.result(b.ask(prompt, 2))
    assert [rows for step in b.runner.forwards for rows in step] == [8, 8, 6, 1]
    b.scheduler._prefill_rows = 100
    assert b.result(b.ask(prompt, 2)).sampled_ids == result.sampled_ids


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5, top_p=0.9, top_k=40, seed=11)])
def test_results_do_not_depend_on_the_batch(bench, sampling):
    b = bench(n_slots=8)
    prompts = [[i + 1] * (3 * i + 1) for i in range(7)]
    alone = [b.result(b.ask(p, 6, sampling=sampling)).sampled_ids for p in prompts]
    together = [b.ask(p, 6, sampling=sampling) for p in prompts]
    assert [b.result(s).sampled_ids for s in together] == alone


def test_sequences_join_and_leave_at_any_step(bench):
    b = bench(step_delay_s=0.02)
    long = b.ask(max_new=40)
    short = [b.ask(max_new=3) for _ in range(3)]
    for sequence in short:
        b.result(sequence)
    assert not long.done.done()
    assert len(b.result(long).sampled_ids) == 40
    widths = [len(step) for step in b.runner.forwards]
    assert max(widths) > 1
    assert widths[-1] == 1


@pytest.mark.alone
def test_cancel_takes_effect_within_two_steps(bench):
    b = bench(step_delay_s=0.1)
    sequence = b.ask(max_new=500)
    while len(sequence.sampled) < 3:
        time.sleep(0.001)
    before = b.scheduler.counters.steps
    b.scheduler.cancel(sequence)
    result = b.result(sequence)
    assert result.finish_reason == "cancelled"
    assert b.scheduler.counters.steps <= before + 2


@pytest.mark.alone
def test_a_chunk_of_a_document_lets_streams_go_on_between_its_layers(bench):
    b = bench(n_layers=12, layer_delay_s=0.05, step_delay_s=0.01)
    sequence = b.ask(max_new=400)
    document = b.scheduler.run(b.runner.new_document, 32)
    before = len(sequence.sampled)
    started = time.monotonic()
    b.scheduler.prefill(document, TOKENS[:16]).result()
    during, took = len(sequence.sampled) - before, time.monotonic() - started
    b.scheduler.cancel(sequence)
    b.result(sequence)
    assert during >= 6
    assert took < 12 * 0.05 / 0.3


@pytest.mark.alone
def test_calls_are_done_between_layers(bench):
    b = bench(n_layers=8, layer_delay_s=0.25)
    document = b.scheduler.run(b.runner.new_document, 16)
    chunk = b.scheduler.prefill(document, TOKENS[:16])
    started = time.monotonic()
    b.scheduler.run(lambda: None)
    assert time.monotonic() - started < 1
    assert not chunk.done()
    chunk.result()


def test_documents_are_prefilled_in_turn(bench):
    b = bench()
    order: list[int] = []
    documents = [b.scheduler.run(b.runner.new_document, 32) for _ in range(3)]
    hold, held = threading.Event(), threading.Event()
    b.scheduler.call(lambda: (held.set(), hold.wait()))
    held.wait()
    chunks = []
    for i, document in enumerate(documents):
        for first in (0, 16):
            chunks.append(b.scheduler.prefill(document, TOKENS[first : first + 16]))
            chunks[-1].add_done_callback(lambda _, i=i: order.append(i))
    hold.set()
    for chunk in chunks:
        chunk.result()
    assert order == [0, 1, 2, 0, 1, 2]


def test_a_cancelled_chunk_leaves_the_document_usable(bench):
    b = bench(n_layers=4, layer_delay_s=0.01)
    document = b.scheduler.run(b.runner.new_document, 16)
    stop = threading.Event()
    chunk = b.scheduler.prefill(document, TOKENS[:16], stop.is_set)
    stop.set()
    with pytest.raises(ChunkCancelled):
        chunk.result()
    assert document.n_tokens == 0
    reference = b.scheduler.run(b.runner.new_document, 16)
    again = [b.scheduler.prefill(d, TOKENS[:16]).result() for d in (document, reference)]
    assert again[0] == again[1]


def test_nan_fails_its_own_sequence_only(bench):
    b = bench()
    b.runner.poisoned.add(66)
    sick, well = b.ask([1, 66]), b.ask([1, 2])
    with pytest.raises(NotFinite):
        b.result(sick)
    assert b.result(well).finish_reason == "length"
    assert sick.sampled == []


def test_the_canary_sees_the_refed_row_before_any_token(bench):
    b = bench()
    seen = []
    for prompt in ([1, 2], list(range(70))):
        b.scheduler._prefill_rows = 256
        b.result(b.ask(prompt, 2, on_canary=lambda logits: seen.append(logits.clone())))
    assert seen[0].equal(seen[1])

    def refuse(logits) -> None:
        raise LookupError("not the same")

    failing = b.ask(on_canary=refuse)
    with pytest.raises(LookupError):
        b.result(failing)
    assert failing.sampled == []


def test_a_failing_step_fails_its_sequences_and_the_engine_goes_on(bench):
    b = bench(tail_tokens=4)
    with pytest.raises(ValueError, match="at most 4"):
        b.result(b.ask([1, 2, 3, 4, 5]))
    assert b.result(b.ask([1], 2)).finish_reason == "length"


def test_prompts_share_the_budget_in_order_of_arrival():
    sequences = [Sequence(i, None, [1] * 6, max_new=1) for i in range(3)]
    decoding = Sequence(3, None, [], max_new=5, sampled=[4])
    parts = compose([*sequences, decoding], 8)
    assert [len(p.rows.tokens) for p in parts] == [6, 2, 1]
    assert [p.rows.logits_from for p in parts] == [5, 2, 0]
    assert parts[-1].sequence is decoding


def test_nothing_leaks_over_300_requests_with_random_cancels(bench):
    b = bench(n_slots=4)
    choose = random.Random(7)
    slots = threading.Semaphore(4)
    open_sequences: list[Sequence] = []
    for _ in range(300):
        if not slots.acquire(blocking=False):
            b.result(open_sequences.pop(0))
        open_sequences.append(b.ask([choose.randrange(200)] * choose.randrange(1, 20), choose.randrange(1, 9)))
        if choose.random() < 0.3:
            b.scheduler.cancel(choose.choice(open_sequences))
    for sequence in open_sequences:
        b.result(sequence)
    assert b.runner.n_tails == 0
    assert b.scheduler.n_running == 0


def test_closing_fails_what_is_open(bench):
    b = bench(step_delay_s=0.005)
    sequence = b.ask(max_new=10_000)
    b.scheduler.close()
    assert isinstance(sequence.done, Future)
    with pytest.raises(SchedulerClosed):
        sequence.done.result()
    with pytest.raises(SchedulerClosed):
        b.scheduler.run(lambda: None)
