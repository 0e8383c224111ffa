"""The calls of the demo, by the client that comes with Preread."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

import service.client as preread

from .errors import DemoError
from .report import Answer, Reading

TIMEOUT = httpx.Timeout(120.0, connect=10.0)


class Client:
    """Calls one server, and nothing twice: what goes wrong is to be seen. Raises DemoError, with the server's own
    words, for every refusal."""

    def __init__(self, base_url: str) -> None:
        self._url = base_url
        self._client = preread.Client(base_url, timeout=TIMEOUT, retries=0, resume_s=0)

    def close(self) -> None:
        self._client.close()

    def not_ready(self) -> str:
        """What the server still waits for, or "" when it would answer a question now."""
        try:
            self._client.check_ready()
        except preread.ConnectionFailed:
            return "the server loads the model"
        except preread.APIError as error:
            return error.detail
        return ""

    def upload(self, path: Path) -> str:
        """Send a file; its document's id."""
        with _told("The server refused"):
            return self._client.documents.upload(path).id

    def read(self, document_id: str, on_progress: Callable[[dict[str, Any]], None]) -> Reading:
        """Follow a document until it is ready."""
        began = prefill_began = time.perf_counter()
        prefill_s = 0.0

        def show(document: preread.Document) -> None:
            nonlocal prefill_began, prefill_s
            now = time.perf_counter()
            if document.status in ("queued", "parsing"):
                prefill_began = now
            elif not prefill_s and document.status != "prefilling":
                prefill_s = now - prefill_began
            if document.error is None:
                on_progress(msgspec.to_builtins(document.progress))

        with _told("The document was not read"):
            document = self._client.documents.wait(document_id, on_progress=show)
        return Reading.of(msgspec.to_builtins(document), prefill_s=prefill_s, total_s=time.perf_counter() - began)

    def new_session(self, document_id: str) -> str:
        """A conversation about a document; its id."""
        with _told("The server refused"):
            return self._client.sessions.create(document_id).id

    def ask(self, session_id: str, question: str, on_text: Callable[[str], None]) -> Answer:
        """Ask, hand over the pieces of the answer as they come, and give the whole."""
        began = time.perf_counter()
        first_text_s = None
        with _told("The question was not answered"), self._client.stream(session_id, question) as events:
            for event in events:
                if isinstance(event, preread.Token):
                    first_text_s = first_text_s or time.perf_counter() - began
                    on_text(event.text)
            answer = events.answer()
        if first_text_s is None:
            raise DemoError(f"The answer to {question!r} is empty.")
        return Answer.of(msgspec.to_builtins(answer), question=question, first_text_s=first_text_s)

    def counter(self, name: str) -> int:
        """A metric without labels."""
        text = httpx.get(f"{self._url}/metrics", timeout=TIMEOUT, trust_env=False).text
        match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        if match is None:
            raise DemoError(f"The server has no metric {name}.")
        return int(float(match[1]))


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except preread.PrereadError as error:
        raise DemoError(f"{what}: {error.detail}") from error
