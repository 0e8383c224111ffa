"""A client that wants its answers, asks again when it is told to, and takes nothing that is wrong."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from tests.chaos.asking import CUT_OFF, FULL, MAX_TOKENS, QUESTIONS, Asking, Known, Seen, Violation
from tests.chaos.world import World
from tests.e2e.server import Server

PATIENCE_S = 120.0
RETRYABLE = {409: {"session_busy", "document_not_ready"}, 429: None, 503: None}
"""By status the codes that mean: try again. None: all."""


class Visitor:
    """Uses any of the API processes. `disk_full`: some disk was full lately, and may be named as the reason."""

    def __init__(self, world: World, seed: int, *, disk_full: bool = False) -> None:
        self._world = world
        self._random = Random(seed)
        self.disk_full = disk_full
        self.seen = Seen()

    def new(self) -> Known:
        """A document that is nowhere yet but in the reference."""
        words = [self._random.choice(("keeper", "lamp", "tower", "harbour", "storm", "ledger")) for _ in range(120)]
        content = f"{self._random.getrandbits(64):x} {' '.join(words)}.".encode()
        reference = self._world.reference
        session = reference.session(reference.ready(content)["id"])
        return Known(content, [reference.ask(session, text, max_tokens=MAX_TOKENS)["answer"] for text in QUESTIONS])

    def read(self, known: Known) -> Known:
        """Upload it, and wait until it is ready; once more where a full disk was the reason that it was given up."""
        deadline = time.monotonic() + PATIENCE_S
        while (read := self._read(known)) is None:
            if time.monotonic() > deadline:
                raise Violation("a document is given up again and again")
            time.sleep(0.2)
        page = self.until(lambda api: api.get(f"/v1/documents/{read.document_id}/pages/1")).json()
        if known.content.decode() not in page["text"]:
            raise Violation("a document's text is another")
        return read

    def _read(self, known: Known) -> Known | None:
        files = {"file": ("document.txt", known.content)}
        document_id = self.until(lambda api: api.request("POST", "/v1/documents", files=files)).json()["id"]

        def looked(api: Server) -> httpx.Response | None:
            response = api.get(f"/v1/documents/{document_id}")
            done = response.status_code != 200 or response.json()["status"] in ("ready", "failed", "cancelled")
            return response if done else None

        body = self.until(looked).json()
        if body["status"] == "ready":
            return Known(known.content, known.answers, document_id)
        if body["error"] is None or body["error"]["code"] != FULL or not self.disk_full:
            raise Violation(f"a document was given up: {body['status']} {body['error']}")
        self.seen.told[f"document failed: {FULL}"] += 1
        return None

    def ask(self, known: Known) -> None:
        """All questions, in a session of its own."""
        body = {"document_ids": [known.document_id]}
        session = self.until(lambda api: api.request("POST", "/v1/sessions", json=body)).json()["id"]
        for n, (text, right) in enumerate(zip(QUESTIONS, known.answers, strict=True)):
            asking = Asking(self, session, text, right, n, streams=self._random.random() < 0.7)
            found = self.until(asking.attempt)
            if found != right:
                raise Violation(f"a wrong answer to question {n + 1}: {found!r}, not {right!r}")
            self.seen.n_answers += 1

    def delete(self, known: Known) -> None:
        """Afterwards no API process knows it."""
        path, body = f"/v1/documents/{known.document_id}", {"document_ids": [known.document_id]}
        self.until(lambda api: _once(api.request("DELETE", path)))
        for api in self._world.apis:
            for call in (lambda api=api: api.get(path), lambda api=api: api.request("POST", "/v1/sessions", json=body)):
                response = self.until(lambda _, call=call: _once(call()))
                if response.status_code != 404:
                    raise Violation(f"what was deleted is known: {response.status_code} {response.text}")

    def until(self, call: Callable[[Server], Any]) -> Any:
        """What a call gives that is neither None nor a refusal that says: try again."""
        began = time.monotonic()
        last = ""
        while time.monotonic() < began + PATIENCE_S:
            try:
                found = call(self._random.choice(self._world.apis))
            except (httpx.TransportError, RuntimeError) as error:  # the second: a client of a server that was replaced
                self.seen.told[CUT_OFF] += 1
                found, last = None, repr(error)
            if isinstance(found, httpx.Response) and found.status_code >= 400:
                last = self._refusal(found)
            elif found is not None:
                self.seen.longest_s = max(self.seen.longest_s, time.monotonic() - began)
                return found.response if isinstance(found, _Once) else found
            time.sleep(0.1)
        raise Violation(f"no answer within {PATIENCE_S:g} s; the last word was {last}")

    def _refusal(self, response: httpx.Response) -> str:
        """Why to try again. Raises Violation when it does not say that."""
        codes = RETRYABLE.get(response.status_code, set())
        body = response.json()
        code = body.get("code") or (body.get("error") or {}).get("code")
        is_full = response.status_code == 507 and code == FULL and self.disk_full
        if codes is not None and code not in codes and not is_full:
            raise Violation(f"refused for good: {response.status_code} {response.text}")
        self.seen.told[f"{response.status_code} {code}"] += 1
        return f"{response.status_code} {code}: {body.get('detail')}"


@dataclass(frozen=True, slots=True)
class _Once:
    response: httpx.Response


def _once(response: httpx.Response) -> httpx.Response | _Once:
    """A 404 is an answer here: what was asked for is gone."""
    return _Once(response) if response.status_code in (200, 404) else response
