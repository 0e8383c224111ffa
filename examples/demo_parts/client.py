"""The REST calls of the demo; nothing in it is known to Preread that a user's client could not do."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from .errors import DemoError
from .report import Answer, Reading
from .sse import Event, events

# A stream that is quiet sends a comment every 15 seconds.
TIMEOUT = httpx.Timeout(10.0, read=120.0)


class Client:
    """Calls one server. Raises DemoError, with the server's own words, for every refusal."""

    def __init__(self, base_url: str) -> None:
        # A proxy in the environment must not get in between: the server is on this machine.
        self._http = httpx.Client(base_url=base_url, timeout=TIMEOUT, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def not_ready(self) -> str:
        """What the server still waits for, or "" when it would answer a question now."""
        try:
            response = self._http.get("/health/ready", timeout=15.0)
        except httpx.TransportError:
            return "the server loads the model"
        return "" if response.is_success else _problem(response)

    def upload(self, path: Path) -> str:
        """Send a file; its document's id."""
        with path.open("rb") as file:
            response = self._http.post("/v1/documents", files={"file": (path.name, file)})
        return _body(response)["id"]

    def read(self, document_id: str, on_progress: Callable[[dict[str, Any]], None]) -> Reading:
        """Follow a document until it is ready."""
        began = prefill_began = time.perf_counter()
        prefill_s = 0.0
        for event in self._stream("GET", f"/v1/documents/{document_id}/events"):
            now = time.perf_counter()
            document = event.data
            if event.name in ("failed", "error"):
                raise DemoError(f"The document was not read: {_reason(document)}")
            if document["status"] in ("queued", "parsing"):
                prefill_began = now
            elif not prefill_s and document["status"] != "prefilling":
                prefill_s = now - prefill_began
            on_progress(document["progress"])
            if event.name == "ready":
                return Reading.of(document, prefill_s=prefill_s, total_s=now - began)
        raise DemoError("The stream of the document's progress ended too early.")

    def new_session(self, document_id: str) -> str:
        """A conversation about a document; its id."""
        return _body(self._http.post("/v1/sessions", json={"document_ids": [document_id]}))["id"]

    def ask(self, session_id: str, question: str, on_text: Callable[[str], None]) -> Answer:
        """Ask, hand over the pieces of the answer as they come, and give the whole."""
        began = time.perf_counter()
        first_text_s = None
        body = {"question": question, "stream": True}
        for event in self._stream("POST", f"/v1/sessions/{session_id}/questions", json=body):
            if event.name == "token":
                first_text_s = first_text_s or time.perf_counter() - began
                on_text(event.data["text"])
            elif event.name == "error":
                raise DemoError(f"The question was not answered: {_reason(event.data)}")
            elif event.name == "done":
                if first_text_s is None:
                    raise DemoError(f"The answer to {question!r} is empty.")
                return Answer.of(event.data, question=question, first_text_s=first_text_s)
        raise DemoError("The stream of the answer ended too early.")

    def counter(self, name: str) -> int:
        """A metric without labels."""
        text = self._http.get("/metrics").text
        match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        if match is None:
            raise DemoError(f"The server has no metric {name}.")
        return int(float(match[1]))

    def _stream(self, method: str, url: str, **arguments: Any) -> Iterator[Event]:
        with self._http.stream(method, url, **arguments) as response:
            if not response.is_success:
                response.read()
                _body(response)
            yield from events(response.iter_bytes())


def _body(response: httpx.Response) -> dict[str, Any]:
    if not response.is_success:
        raise DemoError(f"The server refused ({response.status_code}): {_problem(response)}")
    return response.json()


def _problem(response: httpx.Response) -> str:
    try:
        return response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase


def _reason(data: dict[str, Any]) -> str:
    error = data.get("error") or {}
    return data.get("detail") or error.get("message") or "no reason was given"
