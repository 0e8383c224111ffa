"""Indexes of windowed documents where the runner computes on a device of its own."""

import threading
from contextlib import ExitStack

import pytest
import torch

from service.engine.digests import digest_of
from service.engine.fetch.index import KeyIndex
from service.engine.host.kept import Subject
from service.engine.messages import DocumentRef
from tests.service.engine.host.windowed import MARK, RETENTION, built, with_mark

DOC, OTHER = DocumentRef("own", "doc"), DocumentRef("own", "other")


@pytest.fixture
def device(monkeypatch):
    """A runner's device as far as indexes are concerned; gives the threads that moved and scored them."""
    calls: list[tuple[str, str, bool]] = []
    moved: set[int] = set()
    span_logs = KeyIndex.span_logs

    def move_to(self, device):
        assert device.type == "meta"
        calls.append(("move", threading.current_thread().name, False))
        moved.add(id(self))

    def scored(self, *arguments):
        calls.append(("score", threading.current_thread().name, id(self) in moved))
        return span_logs(self, *arguments)

    monkeypatch.setattr(KeyIndex, "move_to", move_to)
    monkeypatch.setattr(KeyIndex, "span_logs", scored)
    on_device = property(lambda self: torch.device("meta" if id(self) in moved else "cpu"))
    monkeypatch.setattr(KeyIndex, "device", on_device)
    return calls


def start(lab, **more):
    def prepare(runner):
        runner.device = torch.device("meta")

    host = lab.start(prepare=prepare, **more)
    return host._context.scheduler.run(lambda: threading.current_thread().name)


def ask(lab, place, name="a", ref=DOC):
    """Whether the question fetches the mark."""
    tokens = with_mark(place)
    events = lab.ask((MARK, 5), ref=ref, tokens=tokens, retention=RETENTION, name=name, session=name, kv_id="")
    return any(span.first <= place < span.first + span.n_tokens for span in lab.started(events).spans)


def build(lab, place, ref=DOC):
    return built(lab.build(ref, tokens=with_mark(place), retention=RETENTION))


def test_an_index_moves_once_and_is_scored_by_the_engines_thread(lab, device):
    engine = start(lab)
    done = build(lab, 500)
    assert all(ask(lab, 500, name) for name in "ab")
    assert device == [("move", engine, False), ("score", engine, True), ("score", engine, True)]
    assert lab.host.stats().index_nbytes == done.index_nbytes


def test_an_index_without_room_on_the_device_is_scored_where_it_is(lab, device):
    engine = start(lab, index=1)
    build(lab, 500)
    assert ask(lab, 500)
    ((what, thread, moved),) = device
    assert (what, moved) == ("score", False)
    assert thread != engine


def test_an_index_that_goes_leaves_its_room_to_the_next(lab, device):
    index_nbytes = 1000 * (16 + 2)
    start(lab, index=index_nbytes * 3 // 2)
    assert build(lab, 500).index_nbytes == index_nbytes
    build(lab, 300, OTHER)
    device.clear()
    for place, name, ref in ((500, "a", DOC), (300, "b", OTHER), (500, "c", DOC)):
        assert ask(lab, place, name, ref)
    assert [(what, moved) for what, _, moved in device] == [("move", False), ("score", True)] * 3
    assert lab.host.stats().index_documents == 1


def test_an_index_does_not_move_under_those_who_score_with_it(lab, device):
    start(lab, index=1000 * (16 + 2) * 3 // 2)
    build(lab, 500)
    build(lab, 300, OTHER)
    cold, runner = lab.host._context.cold, lab.runner
    places = ((DOC, 500), (OTHER, 300))
    one, other = (Subject.of(runner, ref, digest_of(with_mark(at)), 1000, RETENTION) for ref, at in places)
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(cold.held(one))
        index = second.enter_context(cold.held(other)).index
        first.close()
        with cold.held(other):  # there is room now
            assert index.device.type == "cpu"
        second.close()
        with cold.held(other):
            assert index.device.type == "meta"
