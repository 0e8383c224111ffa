"""Clients of `benchmarks/fleet_run.py`: they ask streamed questions at several API processes, leave in the middle of
answers, come back at another process with `Last-Event-ID`, and compare every character with what is right."""

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.e2e.server import Server
from tests.e2e.sse import Event, events_of, text_of

LEAVES = 0.35
"""Share of streams, and of those taken up again, that a client leaves in the middle."""
MOST_PAUSE_S = 0.5
"""Between leaving and coming back: much less than the grace of an answer without a reader."""
PATIENCE_S = 300.0
HAD = frozenset({"gpu", "host", "disk"})
"""Sources of a document that its worker already had."""


class Wrong(AssertionError):
    """A stream that is not what the single node answered, or a request that was refused for good."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A document, and questions about it with what a single node answered to them, one after the other."""

    document_id: str
    turns: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A question that was answered rightly. `breaks`: how often its stream was left and taken up again."""

    source: str
    tokens: int
    breaks: int
    first_s: float
    total_s: float


@dataclass
class Tally:
    """What all clients saw. `waits`: requests that were told to try again because all places were taken; `errors`:
    answers that ended with an error and were asked for again; `wrong`: what is not right."""

    answers: list[Answer] = field(default_factory=list)
    waits: int = 0
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def share_had(self) -> float:
        """The share of questions answered by a worker that already had the document."""
        return sum(answer.source in HAD for answer in self.answers) / max(len(self.answers), 1)


class Client:
    """One of many, each with a chance of its own. `run` chats until a moment of the monotonic clock. `elsewhere`: it
    takes streams up at another server than the one it left."""

    def __init__(
        self,
        servers: Sequence[Server],
        tally: Tally,
        seed: int,
        *,
        max_tokens: int,
        think_s: float = 0.0,
        elsewhere: bool = True,
    ) -> None:
        self._servers = list(servers)
        self._tally = tally
        self._random = Random(seed)
        self._max_tokens = max_tokens
        self._think_s = think_s
        self._elsewhere = elsewhere
        self._has_left = False

    def run(self, chats: Sequence[Chat], until: float, stop: threading.Event) -> None:
        """Chat about random documents; the last chat is ended. What is wrong is noted, and stops all clients."""
        try:
            while time.monotonic() < until and not stop.is_set():
                self.chat(self._random.choice(chats), until)
        except (AssertionError, httpx.HTTPError) as error:
            self._tally.wrong.append(f"{type(error).__name__}: {error}")
            stop.set()

    def chat(self, chat: Chat, until: float = float("inf")) -> None:
        """All questions of a chat in a session of its own, which is deleted then. Raises Wrong."""
        body = {"document_ids": [chat.document_id]}
        session = self._patiently("POST", "/v1/sessions", json=body).json()["id"]
        for question, right in chat.turns:
            self._tally.answers.append(self._ask(session, question, right))
            if time.monotonic() >= until:
                break
            time.sleep(self._random.expovariate(1 / self._think_s) if self._think_s else 0)
        self._patiently("DELETE", f"/v1/sessions/{session}")

    def _ask(self, session: str, question: str, right: str) -> Answer:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if (answer := self._streamed(session, question, right)) is not None:
                return answer
            time.sleep(0.1)
        raise Wrong(f"no answer within {PATIENCE_S:g} s")

    def _streamed(self, session: str, question: str, right: str) -> Answer | None:
        """None: it was told to ask again."""
        body = {"question": question, "stream": True, "max_tokens": self._max_tokens}
        server, seen, breaks = self._random.choice(self._servers), list[Event](), 0
        began, first = time.monotonic(), 0.0
        with server.client.stream("POST", f"/v1/sessions/{session}/questions", json=body) as response:
            if response.status_code != 200:
                return self._refused(response)
            location = urlsplit(response.headers["location"]).path
            for event in itertools.islice(events_of(response), self._most()):
                seen.append(event)
                if event.name == "token" and not first:
                    first = time.monotonic()
        while not (seen and seen[-1].name in ("done", "error")):
            breaks += 1
            time.sleep(self._random.uniform(0, MOST_PAUSE_S))
            server = self._other(server)
            with self._resumed(server, location, seen) as response:
                seen += itertools.islice(events_of(response), self._most())
            first = first or time.monotonic()
        total_s = time.monotonic() - began
        if seen[-1].name == "error":
            return self._ended_early(seen, right)
        return Answer(*self._checked(seen, right), breaks, first - began, total_s)

    def _most(self) -> int | None:
        """Events after which the client leaves. Each one leaves its first stream after the first event."""
        if not self._has_left:
            self._has_left = True
            return 1
        return self._random.randrange(1, self._max_tokens) if self._random.random() < LEAVES else None

    def _other(self, server: Server) -> Server:
        others = [each for each in self._servers if each is not server]
        return self._random.choice(others) if others and self._elsewhere else server

    @contextmanager
    def _resumed(self, server: Server, location: str, seen: list[Event]) -> Iterator[httpx.Response]:
        last = next((event.id for event in reversed(seen) if event.id), "")
        headers = {"Last-Event-ID": last} if last else {}
        with server.client.stream("GET", location, headers=headers) as response:
            if response.status_code != 200:
                raise Wrong(f"not taken up after event {last!r}: {response.status_code} {response.read().decode()}")
            yield response

    def _checked(self, seen: list[Event], right: str) -> tuple[str, int]:
        """The document's source and the number of tokens. Raises Wrong when a token was lost, doubled or is another."""
        done, text = seen[-1].data, text_of(seen)
        ids = [int(event.id) for event in seen if event.id]
        if ids != sorted(set(ids)):
            raise Wrong(f"events came twice or in another order: {ids}")
        if not text == done["answer"] == right:
            raise Wrong(f"streamed {text!r}, kept {done['answer']!r}; a single node answers {right!r}")
        return done["cache"]["source"], done["usage"]["completion_tokens"]

    def _ended_early(self, seen: list[Event], right: str) -> None:
        problem, text = seen[-1].data, text_of(seen)
        if not problem["retryable"] or not right.startswith(text):
            raise Wrong(f"a stream ended for good after {text!r}: {problem}")
        self._tally.errors.append(f"{problem.get('code')}: {problem.get('detail')}")

    def _refused(self, response: httpx.Response) -> None:
        response.read()
        if response.status_code not in (409, 429, 503):
            raise Wrong(f"refused for good: {response.status_code} {response.text}")
        if response.status_code == 503:
            self._tally.errors.append(response.text)
        else:
            self._tally.waits += 1

    def _patiently(self, method: str, path: str, **options: Any) -> httpx.Response:
        deadline, told = time.monotonic() + PATIENCE_S, ""
        while time.monotonic() < deadline:
            response = self._random.choice(self._servers).request(method, path, **options)
            if response.status_code < 400:
                return response
            self._refused(response)
            told = response.text
            time.sleep(0.1)
        raise Wrong(f"{method} {path} was refused for {PATIENCE_S:g} s: {told}")
