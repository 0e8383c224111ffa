"""Frames between the service and an engine process: a little-endian u32 length, then msgpack.

The server speaks first (`Hello`). Every call has a number of the client's; builds and answers are answered by
`Event`s, the last of which `is_last`, other calls by one `Reply`.
"""

import asyncio
import struct

import msgspec

from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    AnswerText,
    BuildDone,
    BuildProgress,
    BuildRequest,
    DocumentRef,
    EngineInfo,
    EngineStats,
    Failed,
    ReleaseDone,
)

READY = "engine ready"
"""The line on its standard output with which an engine process says that it listens."""
EXIT_CONFIG = 78
"""Its exit status for what another start would not heal (as in sysexits.h)."""
MAX_FRAME_NBYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class FrameRefused(Exception):
    """A frame is too large or says nothing known; the connection is of no use any more."""


class Build(msgspec.Struct, frozen=True, tag="build"):
    call: int
    request: BuildRequest


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    call: int
    request: AnswerRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """`closed`: nobody reads the events any more, in contrast to a client that wants the work given up."""

    request_id: str
    closed: bool


class Release(msgspec.Struct, frozen=True, tag="release"):
    call: int
    document: DocumentRef


class ReleaseSession(msgspec.Struct, frozen=True, tag="release_session"):
    call: int
    session_id: str


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    call: int


class Check(msgspec.Struct, frozen=True, tag="check"):
    call: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answered at once by the process itself, whatever its engine does."""

    call: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int
    info: EngineInfo


class Event(msgspec.Struct, frozen=True, tag="event"):
    call: int
    event: BuildProgress | BuildDone | AnswerStarted | AnswerText | AnswerDone | Failed


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to a call: the field that belongs to it, or `error`."""

    call: int
    released: ReleaseDone | None = None
    stats: EngineStats | None = None
    milliseconds: float = 0.0
    error: str | None = None


Request = Build | Answer | Cancel | Release | ReleaseSession | Stats | Check
ToServer = Request | Ping
FromServer = Hello | Event | Reply

_encoder = msgspec.msgpack.Encoder()
to_server = msgspec.msgpack.Decoder(ToServer)
from_server = msgspec.msgpack.Decoder(FromServer)


def frame(message: ToServer | FromServer) -> bytes:
    """A message with its length in front. Raises FrameRefused when it is too large for any reader."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_NBYTES:
        raise FrameRefused(f"a message of {len(body)} bytes is over {MAX_FRAME_NBYTES}")
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder):
    """The next message, None at the end of the stream. Raises FrameRefused, ConnectionError."""
    try:
        (nbytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if nbytes > MAX_FRAME_NBYTES:
            raise FrameRefused(f"a frame of {nbytes} bytes is over {MAX_FRAME_NBYTES}")
        body = await reader.readexactly(nbytes)
    except asyncio.IncompleteReadError:
        return None
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise FrameRefused(f"a frame cannot be read: {error}") from None
