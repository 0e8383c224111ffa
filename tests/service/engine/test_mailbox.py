import asyncio
import threading
from contextlib import suppress
from unittest.mock import Mock

import pytest

from service.engine.mailbox import Mailbox, one_wake


class CountingLoop(Mock):
    """A loop that only counts how often it is woken, until it is run."""

    def __init__(self) -> None:
        super().__init__(asyncio.AbstractEventLoop)
        self.calls, self.closed = [], False

    def is_closed(self) -> bool:
        return self.closed

    def call_soon_threadsafe(self, call) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.calls.append(call)

    def run(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


@pytest.fixture
def loop():
    return CountingLoop()


def test_what_is_posted_before_the_loop_comes_takes_one_wake_up(loop):
    got = []
    box = Mailbox(loop, got.append)
    for i in range(5):
        box.post(i)
    assert len(loop.calls) == 1
    loop.run()
    box.post(5)
    loop.run()
    assert got == [[0, 1, 2, 3, 4], [5]]


def test_several_boxes_are_woken_once_each_at_the_end_and_others_at_once(loop):
    got, other = [], CountingLoop()
    boxes = [Mailbox(loop, got.extend), Mailbox(other, got.extend)]
    with one_wake():
        with one_wake():
            boxes[0].post("a")
        boxes[0].post("b")
        assert not loop.calls
        thread = threading.Thread(target=boxes[1].post, args=("other thread",))
        thread.start()
        thread.join()
        assert len(other.calls) == 1
        boxes[1].post("c")
    assert (len(loop.calls), len(other.calls)) == (1, 1)
    loop.run()
    other.run()
    assert got == ["a", "b", "other thread", "c"]


def test_boxes_are_woken_though_a_step_failed(loop):
    got = []
    box = Mailbox(loop, got.extend)
    with suppress(ZeroDivisionError), one_wake():
        box.post("before")
        _ = 1 / 0
    loop.run()
    box.post("after")
    loop.run()
    assert got == ["before", "after"]


def test_a_closed_loop_is_told_every_time(loop):
    box = Mailbox(loop, list)
    loop.closed = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            box.post("late")
    with one_wake(), pytest.raises(RuntimeError, match="closed"):
        box.post("later")


def test_a_loop_that_closes_meanwhile_keeps_nobody_else_waiting(loop):
    """The engine's thread, which posts for all, goes on."""
    got, others = [], [CountingLoop() for _ in range(8)]
    with one_wake():
        for each in [*others[:4], loop, *others[4:]]:
            Mailbox(each, got.extend).post("here")
        loop.closed = True
    for each in others:
        each.run()
    assert got == ["here"] * 8


@pytest.mark.anyio
async def test_nothing_is_lost_or_out_of_order_between_threads():
    n, got, done = 20_000, [], asyncio.Event()

    def deliver(items):
        got.extend(items)
        if len(got) == 3 * n:
            done.set()

    box = Mailbox(asyncio.get_running_loop(), deliver)

    def post(name):
        for i in range(0, n, 4):
            with one_wake():
                for k in range(i, i + 3):
                    box.post((name, k))
            box.post((name, i + 3))

    threads = [threading.Thread(target=post, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    await asyncio.wait_for(done.wait(), 60)
    for name in "abc":
        assert [k for who, k in got if who == name] == list(range(n))
