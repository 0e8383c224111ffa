"""A real snapshot store, a runner without a model, and one engine host after another on them."""

import pytest

from cache_store.store import SnapshotStore
from cache_store.tiers.store import TieredStore
from service.engine.digests import digest_of
from service.engine.fake_runner import FakeRunner
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
    TurnRef,
)
from tests.service.engine.host.draft_host import free_drafts, waiting

__all__ = ["free_drafts", "waiting"]

DOC = DocumentRef("own", "doc")
TOKENS = [7 * i % 251 for i in range(100)]
BIG = 1 << 30


class Words:
    """Each id is a word."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{i}>" for i in ids)


class Lab:
    """One engine process after another on one snapshot directory."""

    DOC = DOC
    TOKENS = TOKENS

    def __init__(self, root) -> None:
        self.root = root
        self.hosts: list[EngineHost] = []

    def start(
        self,
        *,
        budget=BIG,
        disk=None,
        end_ids=(),
        max_batch=None,
        prepare=lambda _: None,
        index=BIG,
        draft=None,
        draft_budget=None,
        **more,
    ) -> EngineHost:
        more.setdefault("n_slots", 4)
        heads, tiers, rounds = more.pop("heads", [(1, 0)]), more.pop("tiers", None), more.pop("rounds", 1)
        self.runner = FakeRunner(block_tokens=8, chunk_tokens=16, **more)
        prepare(self.runner)
        self.store = SnapshotStore(self.root, budget_nbytes=disk, free_floor_nbytes=0)
        if tiers is not None:
            self.store = TieredStore(self.root, tiers, budget_nbytes=disk)
        self.host = EngineHost(
            self.runner,
            self.store,
            Words(),
            frozenset(end_ids),
            resident_budget_nbytes=budget,
            max_batch=max_batch,
            engine="fake",
            index_heads=heads,
            index_budget_nbytes=index,
            replay_ids=(3, 1),
            fetch_rounds=rounds,
            draft=draft,
            draft_budget_nbytes=draft_budget,
        )
        self.hosts.append(self.host)
        return self.host

    def build(self, ref=DOC, tokens=TOKENS, name="b", retention=None):
        events: list = []
        self.host.build(BuildRequest(name, ref, list(tokens), retention), events.append).result(60)
        return events

    def ask(self, prompt=(1, 2, 3), turns=(), **more):
        events, future = self.ask_later(prompt, turns, **more)
        future.result(60)
        return events

    def ask_later(self, prompt=(1, 2, 3), turns=(), **more):
        events: list = []
        ref, tokens = more.pop("ref", DOC), more.pop("tokens", TOKENS)
        name = more.pop("name", "a")
        session, kv_id = more.pop("session", "s"), more.pop("kv_id", "kv1")
        more.setdefault("max_tokens", 5)
        retention = more.pop("retention", None)
        sampling = Sampling(**more)
        request = AnswerRequest(
            name, session, ref, digest_of(tokens), len(tokens), list(turns), list(prompt), sampling, kv_id,
            retention=retention,
        )  # fmt: skip
        return events, self.host.answer(request, events.append)

    def follow(self, done: AnswerDone, after="kv1", before=(), **more):
        turns = [*before, TurnRef(after, done.token_ids)]
        return self.ask([*done.pending_ids, 8, 9], turns, **({"kv_id": "kv2"} | more))

    def shards(self, kind="documents"):
        return sorted(self.root.glob(f"snapshots/own/{kind}/*/*/shard-*"))

    @staticmethod
    def done(events) -> AnswerDone:
        assert isinstance(events[-1], AnswerDone), events[-1]
        return events[-1]

    @staticmethod
    def done_build(events) -> BuildDone:
        assert isinstance(events[-1], BuildDone), events[-1]
        return events[-1]

    @staticmethod
    def started(events) -> AnswerStarted:
        assert isinstance(events[0], AnswerStarted), events[0]
        return events[0]

    @staticmethod
    def failed(events) -> Failed:
        assert isinstance(events[-1], Failed), events[-1]
        return events[-1]


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path / "cache")
    yield lab
    for host in lab.hosts:
        host.close()
