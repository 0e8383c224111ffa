"""Hosts with a draft model that is told what the main one answers."""

import time
from contextlib import contextmanager

import pytest

from cache_store.keys import SnapshotKey
from service.engine.drafts.planner import DraftPlanner
from service.engine.host.draft.side import DraftSide
from tests.service.engine.draft_runner import Costs, Successor

SAID = list(range(260, 340))
"""What the main model answers: no token of it is in a document."""
KEY = SnapshotKey("own", "draft", "doc")


@pytest.fixture
def free_drafts(monkeypatch):
    """Rows cost nothing, and a forward of the draft model next to nothing."""
    before = DraftPlanner.__init__

    def init(self, *args):
        before(self, *args)
        self.costs = Costs()

    monkeypatch.setattr(DraftPlanner, "__init__", init)


class Waiting:
    """Answers begin once the draft model follows them, so that it does not matter how fast a machine is."""

    on = True


@pytest.fixture
def waiting(monkeypatch):
    before = DraftSide.following

    @contextmanager
    def following(self, request, cancel):
        with before(self, request, cancel) as follow:
            if follow is not None and Waiting.on:
                until(lambda: follow() is not None)
            yield follow

    monkeypatch.setattr(DraftSide, "following", following)
    monkeypatch.setattr(Waiting, "on", True)
    return Waiting


def start(lab, guesses=SAID, **more):
    """A host whose draft model is told the answer; the draft's runner."""
    options = more.pop("draft_options", {})
    draft = Successor(guesses, **options)
    lab.start(**({"script": SAID, "draft_tokens": 6, "draft": draft} | more))
    return draft


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def settled(lab):
    """The draft model has read what it was to read."""
    until(lambda: not lab.host._context.draft._reading._open)


def drafts(lab):
    return [name for name in lab.store.names() if name.key.kind == "draft"]


def answer(lab, **more):
    return lab.done(lab.ask(**({"max_tokens": 60, "kv_id": ""} | more)))


def plain(lab, **more):
    lab.start(script=SAID)
    lab.build(**{key: more[key] for key in ("tokens", "retention") if key in more})
    return answer(lab, **more)
