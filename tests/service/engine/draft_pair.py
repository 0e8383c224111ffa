"""A model and its twin as draft model, opened as the service opens them: on a card, or the same engine on a CPU."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from service.engine.digests import digest_of
from service.engine.drafts.planner import DraftPlanner
from service.engine.factory import EngineConfig, open_host
from service.engine.host.host import EngineHost
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    BuildDone,
    BuildRequest,
    DocumentRef,
    EngineStats,
    Sampling,
    TurnRef,
)
from service.engine.models.card import load_card, save_card
from tests.service.engine.draft_runner import Costs

DOC = DocumentRef("own", "doc")
WAIT_S = 120.0


def twin(model_dir: Path, directory: Path, **card: Any) -> Path:
    """The same model under another name and with another fingerprint, so that nothing stored for one is the other's."""
    directory.mkdir()
    for path in model_dir.iterdir():
        if path.name != "preread.json":
            (directory / path.name).symlink_to(path.resolve())
    found = load_card(model_dir)
    digests = msgspec.structs.replace(found.digests, weights="5" * 32)
    save_card(msgspec.structs.replace(found, name="twin", digests=digests, **card), directory)
    return directory


@dataclass
class Pair:
    """Engines over one store, one after the other. `tokens` are those of the document."""

    folder: Path
    model_dir: Path
    tokens: Sequence[int]
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draft_dir = twin(self.model_dir, self.folder / "twin")

    @contextmanager
    def host(self, *, draft: bool = True, **changes: Any) -> Iterator[EngineHost]:
        """With the draft model, or without any guesses. No token ends an answer: guesses behind the last one of a short
        answer would count as wrong."""
        how = {"draft_model_dir": str(self.draft_dir)} if draft else {"speculation": "off"}
        given: dict[str, Any] = {
            "store_dir": str(self.folder / "store"),
            "model_dir": str(self.model_dir),
            "free_floor_nbytes": 0,
        }
        merged: dict[str, Any] = given | self.config | how | changes
        host = open_host(EngineConfig(**merged))
        host._context = replace(host._context, end_ids=frozenset())
        try:
            yield host
        finally:
            host.close()

    def build(self, host: EngineHost) -> BuildDone:
        events: list[Any] = []
        host.build(BuildRequest("b", DOC, list(self.tokens)), events.append).result(WAIT_S)
        assert isinstance(events[-1], BuildDone), events[-1]
        return events[-1]

    def until(self, host: EngineHost, what: str, least: int) -> EngineStats:
        """The figures once this one is so large."""
        end = time.monotonic() + WAIT_S
        while getattr(stats := host.stats(), what) < least:
            assert time.monotonic() < end, f"{what} stays at {getattr(stats, what)}"
            time.sleep(0.01)
        return stats

    def ask(
        self,
        host: EngineHost,
        question: Sequence[int],
        turns: Sequence[TurnRef] = (),
        kv_id: str = "",
        session: str = "s",
        max_tokens: int = 32,
    ) -> tuple[AnswerStarted, AnswerDone]:
        events: list[Any] = []
        request = AnswerRequest(
            "a", session, DOC, digest_of(self.tokens), len(self.tokens), list(turns), list(question),
            Sampling(max_tokens), kv_id,
        )  # fmt: skip
        host.answer(request, events.append).result(WAIT_S)
        assert isinstance(events[-1], AnswerDone), events[-1]
        assert isinstance(events[0], AnswerStarted), events[0]
        return events[0], events[-1]

    def until_followed(self, host: EngineHost, question: Sequence[int], max_tokens: int = 32) -> None:
        """Ask until the draft model has guessed: its document comes into memory beside an answer."""
        end = time.monotonic() + WAIT_S
        while not host.stats().draft_guessed_tokens_total:
            assert time.monotonic() < end, "the draft model guesses nothing"
            self.ask(host, question, session="until", max_tokens=max_tokens)


def make_guesses_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin is as slow as the model: it is asked all the same, for as many guesses as a step takes."""
    before = DraftPlanner.__init__

    def init(self: DraftPlanner, *args: int) -> None:
        before(self, *args)
        self.costs = Costs()  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.setattr(DraftPlanner, "__init__", init)


def said(done: AnswerDone) -> list[int]:
    return [*done.token_ids, *done.pending_ids]


@dataclass(frozen=True)
class Seen:
    """What two engines said, the second after a restart, and what was computed of documents then."""

    without: list[list[int]]
    with_draft: list[list[int]]
    resumed: list[int]
    first_resumed: list[int]
    stats: EngineStats
    restarted: EngineStats


def read_ask_restart(pair: Pair, questions: Sequence[Sequence[int]], max_tokens: int = 32) -> Seen:
    """A document is read by both, asked about with the draft model and without, and asked about again, in a session
    that goes on, by a new engine that has the snapshots."""
    with pair.host() as host:
        assert host._context.draft is not None
        assert host._context.store.marks.served_draft == host._context.draft.context.runner.fingerprint.digest
        assert pair.build(host).prefilled_tokens == len(pair.tokens)
        pair.until(host, "draft_document_prefill_tokens_total", len(pair.tokens))
        pair.until_followed(host, questions[0], max_tokens)
        dones = [
            pair.ask(host, question, kv_id=f"k{i}", session=f"s{i}", max_tokens=max_tokens)[1]
            for i, question in enumerate(questions)
        ]
        turn = TurnRef("k0", dones[0].token_ids)
        follow_up = [*dones[0].pending_ids, *questions[1]]
        resumed = said(pair.ask(host, follow_up, [turn], session="s0", max_tokens=max_tokens)[1])
        stats = host.stats()
    with pair.host(draft=False) as host:
        asked = [pair.ask(host, q, session=f"n{i}", max_tokens=max_tokens) for i, q in enumerate(questions)]
    with pair.host() as host:
        again = said(pair.ask(host, follow_up, [turn], session="s0", max_tokens=max_tokens)[1])
        pair.until_followed(host, questions[0], max_tokens)
        restarted = host.stats()
    return Seen([said(done) for _, done in asked], [said(done) for done in dones], again, resumed, stats, restarted)
