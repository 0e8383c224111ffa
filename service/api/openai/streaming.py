"""Server-sent events in OpenAI's forms: chunks of a chat end with `[DONE]`, events of a response have names."""

import msgspec

from service.api.openai.asking import Asking
from service.api.openai.errors import told
from service.api.sse import Event
from service.core.permits import Permit

DONE = "[DONE]"
_encode = msgspec.json.Encoder().encode


class Piece(msgspec.Struct, frozen=True):
    """An event ready to be sent. `data` is a JSON object, or `DONE`."""

    data: object
    name: str = ""
    id: int = 0


class ChatForm:
    """Data alone; an error is `{"error": ...}`."""

    def event(self, event: Event) -> bytes:
        return b"data: [DONE]\n\n" if event.data == DONE else b"data: " + _encode(event.data) + b"\n\n"

    def problem(self, error: Exception) -> bytes:
        return b"data: " + _encode(told(error, "/v1/chat").body) + b"\n\n"


class ResponseForm:
    """A name and data; an error is an event of its own."""

    def event(self, event: Event) -> bytes:
        return b"event: " + event.name.encode() + b"\ndata: " + _encode(event.data) + b"\n\n"

    def problem(self, error: Exception) -> bytes:
        said = told(error, "/v1/responses").error
        data = {"type": "error", "code": said.code, "message": said.message, "param": said.param, "sequence_number": 0}
        return b"event: error\ndata: " + _encode(data) + b"\n\n"


class LatePermit:
    """The permit of an answer that may not have begun when its stream does."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._permit: Permit | None = None
        self._is_known = False

    async def require(self) -> None:
        if not self._is_known and self._asking.stream is not None:
            self._permit, self._is_known = await self._asking.permit(), True
        if self._permit is not None:
            await self._permit.require()
