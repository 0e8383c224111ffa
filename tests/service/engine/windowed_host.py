"""What tests of windowed documents over a real runner share: one engine after another on one store."""

import shutil
import threading
from pathlib import Path

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

DOC = DocumentRef("own", "doc")


class Words:
    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{i}>" for i in ids)


class WindowedHost:
    """`make_runner` gives a runner for each engine, `heads` are its index heads."""

    def __init__(self, make_runner, root: Path, tokens: list[int], retention: Retention, heads) -> None:
        self._make_runner = make_runner
        self.root = root
        self.tokens = tokens
        self.retention = retention
        self._heads = heads
        self.budget = 1 << 30
        self.start()

    def start(self) -> None:
        self.runner = self._make_runner()
        self.host = EngineHost(
            self.runner,
            SnapshotStore(self.root),
            Words(),
            frozenset(),
            resident_budget_nbytes=self.budget,
            index_heads=self._heads,
            replay_ids=(3, 4, 5),
        )

    def restart(self) -> None:
        self.host.close()
        self.start()

    def forget(self) -> None:
        """No snapshot is left."""
        self.host.close()
        shutil.rmtree(self.root)
        self.start()

    def build(self) -> BuildDone:
        events: list = []
        self.host.build(BuildRequest("b", DOC, self.tokens, self.retention), events.append).result()
        assert isinstance(events[-1], BuildDone), events[-1]
        return events[-1]

    def build_and_kill(self, at_token: int) -> int:
        """Close the engine once a build has so many tokens on disk; how many it had."""
        durable: list[int] = []
        there = threading.Event()

        def emit(event) -> None:
            if isinstance(event, BuildProgress) and event.stage == "prefilling":
                durable.append(event.done)
                if event.done >= at_token:
                    there.set()

        future = self.host.build(BuildRequest("b", DOC, self.tokens, self.retention), emit)
        assert there.wait(60)
        self.host.close()
        future.result()
        self.start()
        return max(durable)

    def ask(self, prompt, turns=(), *, session="s", kv_id="") -> tuple[AnswerStarted, AnswerDone]:
        events: list = []
        request = AnswerRequest(
            f"q{session}", session, DOC, digest_of(self.tokens), len(self.tokens), list(turns), list(prompt),
            Sampling(6), kv_id, retention=self.retention,
        )  # fmt: skip
        self.host.answer(request, events.append).result()
        assert isinstance(events[0], AnswerStarted), events[0]
        assert isinstance(events[-1], AnswerDone), events[-1]
        return events[0], events[-1]

    def follow(self, first: tuple[AnswerStarted, AnswerDone], kv_id: str, *, session="s"):
        started, done = first
        return self.ask([*done.pending_ids, 9, 8], [TurnRef(kv_id, done.token_ids, started.spans)], session=session)

    def files(self) -> dict[str, bytes]:
        """All shards, by kind."""
        return {path.parts[-4] + path.name: path.read_bytes() for path in self.root.glob("snapshots/own/*/*/*/shard-*")}


def check_restarts_change_nothing(desk: WindowedHost, *, exact: bool = True) -> None:
    """A question, a follow-up, and both again from the next engine; then a turn that was lost, which is computed in one
    go and not token by token: not `exact` in 16 bits."""
    done = desk.build()
    assert done.prefilled_tokens == len(desk.tokens)
    first = desk.ask([5, 6, 7], kv_id="k1")
    assert first[0].spans
    assert first[0].first_pass_tokens == 3
    second = desk.follow(first, "k1")
    desk.restart()
    assert desk.build().already
    again = desk.ask([5, 6, 7], session="x")
    assert again[0].restored_tokens == done.resident_tokens
    follow_up = desk.follow(first, "k1", session="y")
    for one, other in ((again, first), (follow_up, second)):
        assert (one[0].spans, one[1].token_ids) == (other[0].spans, other[1].token_ids)
    assert desk.host.stats().document_prefill_tokens_total == 0
    lost = desk.follow(first, "", session="z")
    assert (lost[0].miss_reason, lost[0].spans) == ("absent", second[0].spans)
    assert not exact or lost[1].token_ids == second[1].token_ids


def check_a_killed_build_goes_on(desk: WindowedHost, places) -> None:
    """Kill a build at each of some places; each time the next one goes on, to the bytes of one that was not killed."""
    desk.build()
    whole, chunk = desk.files(), desk.runner.limits.chunk_tokens
    kinds = {"documents", "residents", *(["slots"] if desk.runner.limits.ragged_slots else [])}
    assert {name.partition("shard")[0] for name in whole} == kinds
    for place in places:
        desk.forget()
        durable = desk.build_and_kill(place)
        done = desk.build()
        assert done.prefilled_tokens < len(desk.tokens) - durable + chunk
        assert desk.files() == whole
