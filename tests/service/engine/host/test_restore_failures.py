"""A restore that ends half way: nothing is left behind, other streams go on, the next question is answered."""

import time

import pytest
import torch

from service.engine.exl2_engine.copies import CopyStream, HostRing
from service.engine.messages import AnswerText, DocumentRef

OTHER = DocumentRef("own", "other")
N_SLOTS = 3


class Loads:
    """Wraps the runner's `load_blocks`: counts, slows down, or fails at a chosen call."""

    def __init__(self, runner, *, delay_s=0.0, fail_at=-1) -> None:
        self.n = 0
        self._load = runner.load_blocks
        self._delay_s = delay_s
        self._fail_at = fail_at
        runner.load_blocks = self

    def __call__(self, *arguments) -> None:
        self.n += 1
        time.sleep(self._delay_s)
        if self.n == self._fail_at:
            raise MemoryError("no room for a copy")
        self._load(*arguments)


def restarted(lab, **more):
    """A new engine on the same snapshots, which reads through a small ring as an engine on a card does."""
    lab.host.close()
    lab.start(n_slots=5, **more)
    record = lab.runner.layout.record_nbytes(8)
    ring = lab.runner.load_buffers = HostRing(CopyStream(torch.device("cpu")), record, N_SLOTS)
    return ring


def stream(lab, n_tokens=200):
    """A running answer on another document, and what it would be alone."""
    alone = lab.done(lab.ask(ref=OTHER, name="alone", session="x", kv_id="", max_tokens=n_tokens)).token_ids
    lab.runner.step_delay_s = 0.002
    events, future = lab.ask_later(ref=OTHER, name="running", session="y", kv_id="", max_tokens=n_tokens)
    while not any(isinstance(e, AnswerText) for e in events):
        time.sleep(0.002)
    return alone, events, future


@pytest.fixture
def built(lab):
    """Both documents on disk, and the right answer about the first."""
    lab.start()
    lab.build()
    lab.build(OTHER)
    return lab.done(lab.ask(kv_id="")).token_ids


def expect_all_well(lab, ring, running, answer) -> None:
    """The other stream ended as if alone, all memory came back, the document is answered from disk again."""
    alone, events, future = running
    future.result(60)
    assert lab.done(events).token_ids == alone
    lab.host._context.scheduler.run(lambda: None)
    assert ring.n_free == N_SLOTS
    assert lab.runner.n_documents == 1
    assert lab.host.stats().document_references == 0
    events = lab.ask(kv_id="", name="again", session="again")
    assert lab.started(events).source == "disk"
    assert lab.done(events).token_ids == answer
    assert ring.n_free == N_SLOTS


def test_a_cancelled_restore(lab, built):
    ring = restarted(lab)
    running = stream(lab)
    loads = Loads(lab.runner, delay_s=0.05)
    events, future = lab.ask_later(kv_id="", name="restoring", session="z")
    while loads.n < 3:
        time.sleep(0.001)
    lab.host.cancel("restoring")
    future.result(60)
    assert lab.failed(events).code == "cancelled"
    assert loads.n < 26, "the restore went on to its end"
    lab.runner.load_blocks = loads._load
    expect_all_well(lab, ring, running, built)


def test_a_shard_damaged_half_way(lab, built):
    ring = restarted(lab)
    running = stream(lab)
    (shard,) = [s for s in lab.shards() if "/doc/" in str(s)]
    good = shard.read_bytes()
    shard.write_bytes(good[:-1000] + bytes([good[-1000] ^ 1]) + good[-999:])
    loads = Loads(lab.runner)
    failed = lab.failed(lab.ask(kv_id="", session="z"))
    assert (failed.code, failed.miss_reason, failed.retryable) == ("snapshot_miss", "checksum", True)
    assert loads.n > 3, "nothing was loaded before the damage"
    lab.host._context.scheduler.run(lambda: None)
    assert lab.runner.n_documents == 1
    lab.build(name="rebuilt")
    lab.host.release(lab.DOC)
    expect_all_well(lab, ring, running, built)


def test_no_memory_in_the_middle_of_a_restore(lab, built):
    ring = restarted(lab)
    running = stream(lab)
    Loads(lab.runner, fail_at=9)
    assert "no room" in lab.failed(lab.ask(kv_id="", session="z")).detail
    expect_all_well(lab, ring, running, built)


def test_an_engine_that_ends_meanwhile_leaves_nobody_waiting_for_memory(lab, built):
    ring = restarted(lab)
    loads = Loads(lab.runner, delay_s=0.06)
    asked = [lab.ask_later(kv_id="", name=f"a{i}", session=f"s{i}", ref=ref) for i, ref in enumerate((lab.DOC, OTHER))]
    while loads.n < 2:
        time.sleep(0.001)
    lab.host.close()
    for events, future in asked:
        future.result(60)
        assert lab.failed(events).code == "engine_lost"
    assert ring.n_free == N_SLOTS
