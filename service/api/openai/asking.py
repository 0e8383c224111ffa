"""From a request to an answer's stream: files inside it, its documents, and the wait for them."""

import asyncio
import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request

from service.api.answer_events import whole_answer
from service.api.openai.ids import document_id
from service.api.schemas.questions import AnswerBody
from service.core.chats import chats
from service.core.chats.dialogue import Message
from service.core.chats.texts import INLINE
from service.core.keys import MANAGE, Principal
from service.core.permits import Permit
from service.core.repeats import Repeat
from service.core.sampling import Question
from service.core.services import Services
from service.core.streams import AnswerStream
from service.core.uploads import UploadSettings
from service.errors import Forbidden, Invalid, TooLarge, Unauthenticated, Unavailable

MAX_BODY_BYTES = 64 << 20
"""Of a request with files in it."""
MAX_TEXT_CHARS = 4_000_000
"""Of its messages together: what is longer takes long to be refused by its tokens."""
MAX_MESSAGES = 4096
"""What no session has is written down, question by question, while nobody else writes."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file in a message: the id of one that is here, or its bytes in base64. `at` is its place, for errors."""

    file_id: str | None
    file_data: str | None
    filename: str | None
    at: str


@dataclass(frozen=True, slots=True)
class Said:
    """A message as it came."""

    role: str
    texts: Sequence[str]
    files: Sequence[FilePart] = ()


class Asking:
    """One request. `open` it for what can be refused at once; then there is an `answer`, whole or as a stream."""

    def __init__(self, request: Request[Any, Any, Any], services: Services, principal: Principal) -> None:
        self._request = request
        self._services = services
        self._principal = principal
        self._chat: chats.Chat | None = None
        self.stream: AnswerStream | None = None

    async def open(
        self,
        said: Sequence[Said],
        question: Question,
        *,
        documents: Sequence[str] = (),
        previous: str | None = None,
        repeat_key: str | None = None,
        body: msgspec.Struct,
    ) -> None:
        """Raises what the use cases do. When all documents are ready, the question has been asked afterwards."""
        if len(said) > MAX_MESSAGES:
            raise TooLarge(f"There are {len(said):,} messages, at most {MAX_MESSAGES:,} are taken.")
        if sum(len(text) for each in said for text in each.texts) > MAX_TEXT_CHARS:
            raise TooLarge(f"The messages have more than {MAX_TEXT_CHARS:,} characters: send long texts as files.")
        principal = self._principal
        repeat = None
        if repeat_key is not None:
            digest = msgspec.json.encode(body).decode()
            repeat = Repeat("chat", principal.user_id, repeat_key, digest, anywhere=True)
        request = chats.Request(
            [await self._message(each) for each in said],
            question,
            [document_id(name) for name in documents],
            previous,
            may_keep=MANAGE in principal.scopes,
            is_link=principal.is_link,
            repeat=repeat,
        )
        self._chat = await self._services.chats.chats.open(principal.user_id, request)
        if self._chat.is_ready:
            await self.ask()

    async def ask(self) -> AnswerStream:
        """The answer's stream; waits for documents first."""
        assert self._chat is not None
        if self.stream is None:
            if not self._chat.is_ready:
                await self._services.chats.chats.wait(self._chat)
                if not await self._services.keys.is_valid(self._principal):
                    raise Unauthenticated("The key was revoked, or its time is over.", code="invalid_key")
            self.stream = await self._services.chats.chats.ask(self._chat)
        return self.stream

    async def permit(self) -> Permit | None:
        """What must be asked before any of the answer is shown."""
        stream = await self.ask()
        return await self._services.permits.of_session(self._principal, stream.session_id)

    async def whole(self) -> AnswerBody | None:
        """The answer once it is over; None when the client left before. Raises the error it ended with."""
        if self.stream is None and not await self._asked_in_time():
            return None
        permit = await self.permit()
        assert self.stream is not None
        answer = await whole_answer(self._request, self.stream, self._services.stopping)
        if permit is not None:
            await permit.require()
        return answer

    async def _asked_in_time(self) -> bool:
        """Wait for the documents, for as long as the client does and the server runs."""
        asking = asyncio.ensure_future(self.ask())
        left = asyncio.ensure_future(self._left())
        stop = asyncio.ensure_future(self._services.stopping.wait())
        try:
            await asyncio.wait({asking, left, stop}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
                return True
            if stop.done():
                raise Unavailable("The server is shutting down: ask again.")
            return False
        finally:
            for task in (asking, left, stop):
                task.cancel()

    async def _left(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass

    async def _message(self, said: Said) -> Message:
        documents = [await self._document(file) for file in said.files]
        return Message(said.role, tuple(said.texts), tuple(documents))

    async def _document(self, file: FilePart) -> str:
        if file.file_id:
            return document_id(file.file_id)
        if not file.file_data:
            raise Invalid("A file needs a `file_id`, or `file_data`.", param=file.at)
        if MANAGE not in self._principal.scopes:
            raise Forbidden(
                "A file inside a request becomes a document: that needs a key with the scope `manage`.",
                code="scope_missing",
            )
        data = await asyncio.to_thread(_decoded, file)
        chats = self._services.chats
        settings = UploadSettings(file.filename or "file", ttl_s=int(chats.ttl_s), purpose=INLINE)
        row, _ = await self._services.uploads.take(self._principal.user_id, [data], settings)
        await chats.repeated.touch(row)
        return row.id


def _decoded(file: FilePart) -> bytes:
    """Of base64, with or without `data:...;base64,` before it."""
    text = file.file_data or ""
    if text.startswith("data:"):
        head, _, text = text.partition(",")
        if not head.endswith(";base64"):
            raise Invalid("file_data must be base64, as `data:...;base64,...`.", param=file.at)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise Invalid("file_data is not base64.", param=file.at) from None
