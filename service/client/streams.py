"""The two streams of the API: a document's progress, and an answer."""

from typing import Any

import httpx

from service.client import calls
from service.client.attempts import Patience
from service.client.errors import DocumentFailed, StreamLost, UnexpectedResponse
from service.client.following import Following, decoded
from service.client.models import Answer, Citation, Document, Done, Event, Token
from service.client.sse import ServerEvent


class DocumentFollowing(Following[Document]):
    """Each event is the document as it is then."""

    def __init__(self, document_id: str, patience: Patience, url: str, timeout_s: float | None = None) -> None:
        super().__init__(calls.document_events(document_id, ""), patience, url, timeout_s=timeout_s)
        self._document_id = document_id

    def _again(self) -> calls.Call:
        return calls.document_events(self._document_id, self.last_event_id)

    def _told(self, event: ServerEvent) -> Document | None:
        if event.name not in ("progress", "ready", "failed"):
            return None
        document = decoded(event.data, Document)
        self.is_over = event.name != "progress"
        return document


class AnswerFollowing(Following[Event]):
    """The events of an answer, each once. `text` is what has come of it; `answer` all of it, once it is over."""

    def __init__(
        self,
        first: calls.Call,
        session_id: str,
        patience: Patience,
        url: str,
        *,
        answer_id: str = "",
        last_event_id: str = "",
    ) -> None:
        super().__init__(first, patience, url, last_event_id=last_event_id)
        self.session_id = session_id
        self.answer_id = answer_id
        self.text = ""
        self.answer: Answer | None = None
        self._end = int(last_event_id) if last_event_id.isdigit() else 0

    def opened(self, response: httpx.Response) -> None:
        super().opened(response)
        if not self.answer_id:
            # Behind a proxy its beginning may be another one; what is behind that is ours.
            path = response.headers.get("location", "").rsplit("/", 2)
            if len(path) != 3 or path[2] != "events":
                raise UnexpectedResponse("The server did not say where the stream of the answer is.")
            self.answer_id = path[1]

    def _again(self) -> calls.Call:
        return calls.answer_events(self.session_id, self.answer_id, self.last_event_id)

    def _told(self, event: ServerEvent) -> Event | None:
        if event.name == "token":
            return self._token(event)
        if event.name == "citation":
            return decoded(event.data, Citation)
        if event.name == "done":
            self.answer = decoded(event.data, Answer)
            self.is_over = True
            return Done(self.answer)
        return None

    def _token(self, event: ServerEvent) -> Token | None:
        """An event's id is the number of characters through its end, so that a gap or a repetition shows."""
        text = decoded(event.data, dict[str, Any]).get("text", "")
        if not event.id.isdigit():
            raise UnexpectedResponse("The server sent a piece of an answer without its place.")
        begin, end = int(event.id) - len(text), int(event.id)
        if begin > self._end:
            raise UnexpectedResponse("The server left out a piece of the answer.")
        text = text[self._end - begin :]
        self._end = max(end, self._end)
        self.text += text
        return Token(text, self._end) if text else None

    def _given_up(self, error: Exception) -> Exception:
        where = f"It may go on at the server: follow {self.answer_id} of {self.session_id} to take it up again."
        return StreamLost(
            f"The answer was lost, and could not be taken up again. {where} ({error})",
            session_id=self.session_id, answer_id=self.answer_id, last_event_id=self.last_event_id, text=self.text,
        )  # fmt: skip


def ready(document: Document | None) -> Document:
    """The last state of a document that was waited for. Raises DocumentFailed, UnexpectedResponse."""
    if document is None:
        raise UnexpectedResponse("The stream of the document's progress was empty.")
    if document.status != "ready":
        raise DocumentFailed(document)
    return document


def whole(following: AnswerFollowing) -> Answer:
    """The answer of a stream that was read to its end. Raises UnexpectedResponse."""
    if following.answer is None:
        raise UnexpectedResponse("The stream ended without the answer.")
    return following.answer
