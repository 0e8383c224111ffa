"""A client that wants its answers, asks again when it is told to, and takes nothing that is wrong."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from tests.chaos.world import World
from tests.e2e.server import Server
from tests.e2e.sse import events_of, text_of

PATIENCE_S = 120.0
RETRYABLE = {409: {"session_busy", "document_not_ready"}, 429: None, 503: None}
"""By status the codes that mean: try again. None: all."""
QUESTIONS = ("Who keeps it?", "And since when?")
MAX_TOKENS = 24


class Violation(AssertionError):
    """Something was lost, wrong, or refused for good."""


@dataclass(frozen=True, slots=True)
class Known:
    """A document, and what the reference answers to `QUESTIONS` about it, one after the other."""

    content: bytes
    answers: list[str]
    document_id: str = ""


class Visitor:
    """Uses any of the API processes. `n_told`: how often it was told to ask again."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = Random(seed)
        self.n_told = 0

    def new(self) -> Known:
        """A document that is nowhere yet but in the reference."""
        words = [self._random.choice(("keeper", "lamp", "tower", "harbour", "storm", "ledger")) for _ in range(120)]
        content = f"{self._random.getrandbits(64):x} {' '.join(words)}.".encode()
        reference = self._world.reference
        session = reference.session(reference.ready(content)["id"])
        return Known(content, [reference.ask(session, text, max_tokens=MAX_TOKENS)["answer"] for text in QUESTIONS])

    def read(self, known: Known) -> Known:
        """Upload it, and wait until it is ready."""
        files = {"file": ("document.txt", known.content)}
        document_id = self._until(lambda api: api.request("POST", "/v1/documents", files=files)).json()["id"]

        def looked(api: Server) -> httpx.Response | None:
            response = api.get(f"/v1/documents/{document_id}")
            if response.status_code == 200 and response.json()["status"] in ("failed", "cancelled"):
                raise Violation(f"a document was given up: {response.json()['error']}")
            done = response.status_code != 200 or response.json()["status"] == "ready"
            return response if done else None

        self._until(looked)
        page = self._until(lambda api: api.get(f"/v1/documents/{document_id}/pages/1")).json()
        if known.content.decode() not in page["text"]:
            raise Violation("a document's text is another")
        return Known(known.content, known.answers, document_id)

    def ask(self, known: Known) -> None:
        """All questions, in a session of its own."""
        body = {"document_ids": [known.document_id]}
        session = self._until(lambda api: api.request("POST", "/v1/sessions", json=body)).json()["id"]
        for n, (text, right) in enumerate(zip(QUESTIONS, known.answers, strict=True)):
            found = self._answer(session, text, right, n)
            if found != right:
                raise Violation(f"a wrong answer to question {n + 1}: {found!r}, not {right!r}")

    def _answer(self, session: str, text: str, right: str, n_before: int) -> str:
        """Asked until there is one. An answer whose reader was cut off may have gone on: then it is there."""
        streams = self._random.random() < 0.7

        def asked(api: Server) -> httpx.Response | str | None:
            try:
                return self._streamed(api, session, text, right) if streams else self._posted(api, session, text)
            except httpx.TransportError:
                self.n_told += 1
                turns = self._until(lambda api: api.get(f"/v1/sessions/{session}")).json()["turns"]
                return self._last(turns, n_before)

        return self._until(asked)

    def _posted(self, api: Server, session: str, text: str) -> httpx.Response | str:
        response = api.question(session, text, max_tokens=MAX_TOKENS)
        return response.json()["answer"] if response.status_code == 200 else response

    def _streamed(self, api: Server, session: str, text: str, right: str) -> httpx.Response | str | None:
        body = {"question": text, "stream": True, "max_tokens": MAX_TOKENS}
        with api.client.stream("POST", f"/v1/sessions/{session}/questions", json=body) as response:
            if response.status_code != 200:
                response.read()
                return response
            events = list(events_of(response))
        seen = text_of(events)
        if not right.startswith(seen):
            raise Violation(f"a stream went wrong: {seen!r}, not {right!r}")
        if events and events[-1].name == "done":
            return events[-1].data["answer"]
        if not events or events[-1].name != "error":
            raise httpx.ReadError("the stream was cut off")
        if not events[-1].data["retryable"]:
            raise Violation(f"a stream ended for good: {events[-1].data}")
        self.n_told += 1
        return None

    def _last(self, turns: list[dict[str, Any]], n_before: int) -> str | None:
        done = [turn for turn in turns if turn["status"] == "done"]
        if any(turn["status"] == "cancelled" for turn in turns):
            raise Violation("an answer that nobody cancelled was")
        return done[-1]["answer"] if len(done) > n_before else None

    def _until(self, call: Callable[[Server], Any]) -> Any:
        """What a call gives that is neither None nor a refusal that says: try again."""
        deadline = time.monotonic() + PATIENCE_S
        last = ""
        while time.monotonic() < deadline:
            try:
                found = call(self._random.choice(self._world.apis))
            except (httpx.TransportError, RuntimeError) as error:  # the second: a client of a server that was replaced
                self.n_told += 1
                found, last = None, repr(error)
            if isinstance(found, httpx.Response) and found.status_code >= 400:
                last = self._refusal(found)
            elif found is not None:
                return found
            time.sleep(0.1)
        raise Violation(f"no answer within {PATIENCE_S:g} s; the last word was {last}")

    def _refusal(self, response: httpx.Response) -> str:
        """Why to try again. Raises Violation when it does not say that."""
        codes = RETRYABLE.get(response.status_code, set())
        body = response.json()
        if codes is not None and body.get("code") not in codes:
            raise Violation(f"refused for good: {response.status_code} {response.text}")
        self.n_told += 1
        return f"{response.status_code} {body.get('code')}: {body.get('detail')}"
