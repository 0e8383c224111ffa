"""What the parser process says to its parent: length-prefixed msgpack, one message a page."""

import asyncio
import struct
from typing import Any, BinaryIO

import msgspec

from ingest.limits import ParseLimits
from ingest.model import MediaType

_LENGTH = struct.Struct("<I")
MAX_FRAME_NBYTES = 512 * 1024 * 1024


class ParseRequest(msgspec.Struct, frozen=True):
    """Sent once over standard input, because arguments (a password among them) are visible to every user."""

    path: str
    password: str | None
    limits: ParseLimits


class Started(msgspec.Struct, frozen=True, tag=True):
    """The interpreter is up; from here on time counts against the file."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    media_type: MediaType
    n_pages: int
    title: str | None


class PageRead(msgspec.Struct, frozen=True, tag=True):
    number: int
    label: str | None
    text: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    warnings: list[str]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """An IngestError, for `ingest.errors.rebuild`."""

    code: str
    params: dict[str, Any]


Message = Started | Opened | PageRead | Finished | Refused
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """One frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def receive(stream: asyncio.StreamReader) -> Message | None:
    """The next message, None at the end. Raises ValueError for a frame that is none of ours."""
    try:
        (n,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
        if n > MAX_FRAME_NBYTES:
            raise ValueError("frame too long")
        return _decoder.decode(await stream.readexactly(n))
    except asyncio.IncompleteReadError:
        return None
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


def pack_request(request: ParseRequest) -> bytes:
    body = _encoder.encode(request)
    return _LENGTH.pack(len(body)) + body


def read_request(stream: BinaryIO) -> ParseRequest:
    (n,) = _LENGTH.unpack(stream.read(_LENGTH.size))
    return msgspec.msgpack.decode(stream.read(n), type=ParseRequest)
