"""One question, asked until its answer is there, by a client that takes a stream up again where it was cut off."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from tests.e2e.server import Server
from tests.e2e.sse import events_of, text_of

FULL = "storage_full"
"""Means to try again while a disk is full, and says what to do."""
QUESTIONS = ("Who keeps it?", "And since when?")
MAX_TOKENS = 24
CUT_OFF = "connection lost"
_NOTHING = object()


class Violation(AssertionError):
    """Something was lost, wrong, or refused for good."""


@dataclass(frozen=True, slots=True)
class Known:
    """A document, and what the reference answers to `QUESTIONS` about it, one after the other."""

    content: bytes
    answers: list[str]
    document_id: str = ""


@dataclass(slots=True)
class Seen:
    """What visitors met. `told`: why they had to ask again, and how often; `longest_s`: the longest wait for one thing
    that they wanted."""

    told: Counter[str] = field(default_factory=Counter)
    n_answers: int = 0
    longest_s: float = 0.0

    def add(self, other: "Seen") -> None:
        self.told += other.told
        self.n_answers += other.n_answers
        self.longest_s = max(self.longest_s, other.longest_s)


class Asker(Protocol):
    """Who asks."""

    seen: Seen
    disk_full: bool

    def until(self, call: Callable[[Server], Any]) -> Any: ...


class Asking:
    """A question that has `n_before` others before it in its session. Whether something became of an attempt that
    failed is looked up before the next one: an answer that nobody reads may go on."""

    def __init__(self, asker: Asker, session: str, text: str, right: str, n_before: int, *, streams: bool) -> None:
        self._asker = asker
        self._session = session
        self._text = text
        self._right = right
        self._n_before = n_before
        self._streams = streams
        self._unsure = False

    def attempt(self, api: Server) -> httpx.Response | str | None:
        """The answer; a refusal; None when it has to be asked for again."""
        try:
            if self._unsure and (found := self._looked_up(api)) is not _NOTHING:
                return found
            found = self._streamed(api) if self._streams else self._posted(api)
        except httpx.TransportError:
            self._unsure = True
            raise
        self._unsure = not isinstance(found, str)
        return found

    def _looked_up(self, api: Server) -> Any:
        """What the session has: the answer, or the end of one that runs. `_NOTHING`: neither."""
        turns = self._asker.until(lambda api: api.get(f"/v1/sessions/{self._session}")).json()["turns"]
        done = [turn for turn in turns if turn["status"] == "done"]
        if any(turn["status"] == "cancelled" for turn in turns):
            raise Violation("an answer that nobody cancelled was")
        if len(done) > self._n_before:
            return done[-1]["answer"]["answer"]
        running = [turn for turn in turns if turn["status"] == "running"]
        return self._followed(api, running[-1]["id"]) if running else _NOTHING

    def _followed(self, api: Server, answer_id: str) -> httpx.Response | str | None:
        path = f"/v1/sessions/{self._session}/questions/{answer_id}/events"
        with api.client.stream("GET", path, headers={"Last-Event-ID": "0"}) as response:
            return self._read(response)

    def _posted(self, api: Server) -> httpx.Response | str:
        response = api.question(self._session, self._text, max_tokens=MAX_TOKENS)
        return response.json()["answer"] if response.status_code == 200 else response

    def _streamed(self, api: Server) -> httpx.Response | str | None:
        body = {"question": self._text, "stream": True, "max_tokens": MAX_TOKENS}
        with api.client.stream("POST", f"/v1/sessions/{self._session}/questions", json=body) as response:
            return self._read(response)

    def _read(self, response: httpx.Response) -> httpx.Response | str | None:
        """The answer of a stream; None when it ended with an error that says: ask again."""
        if response.status_code != 200:
            response.read()
            return response
        events = list(events_of(response))
        seen = text_of(events)
        if not self._right.startswith(seen):
            raise Violation(f"a stream went wrong: {seen!r}, not {self._right!r}")
        if events and events[-1].name == "done":
            return events[-1].data["answer"]
        if not events or events[-1].name != "error":
            raise httpx.ReadError("the stream was cut off")
        code = events[-1].data["error"]["code"]
        if not events[-1].data["retryable"] and not (code == FULL and self._asker.disk_full):
            raise Violation(f"a stream ended for good: {events[-1].data}")
        self._asker.seen.told[f"stream: {code}"] += 1
        return None
