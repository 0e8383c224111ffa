"""A client for Preread servers.

    from service.client import Client

    with Client("http://127.0.0.1:8420") as client:
        document = client.documents.upload("contract.pdf")
        client.documents.wait(document.id)
        session = client.sessions.create(document.id)
        print(client.ask(session.id, "Who pays?").text)

It needs httpx and msgspec, and imports nothing else of Preread. `AsyncClient` has the same methods, awaited.
"""

from service.client.aio.answers import AsyncAnswerStream
from service.client.aio.client import AsyncClient
from service.client.errors import (
    APIError,
    BadRequest,
    Conflict,
    ConnectionFailed,
    DocumentFailed,
    Forbidden,
    Invalid,
    NotFound,
    PrereadError,
    RateLimited,
    ServerFailed,
    StorageFull,
    StreamLost,
    TimedOut,
    TooLarge,
    TooLong,
    Unauthenticated,
    Unavailable,
    UnexpectedResponse,
    UnsupportedType,
)
from service.client.models import (
    Answer,
    Citation,
    Document,
    Done,
    Event,
    Page,
    Receipt,
    Session,
    SessionDetail,
    Share,
    Token,
    Turn,
    Uploaded,
)
from service.client.sync.answers import AnswerStream
from service.client.sync.client import Client

__all__ = [
    "APIError",
    "Answer",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncClient",
    "BadRequest",
    "Citation",
    "Client",
    "Conflict",
    "ConnectionFailed",
    "Document",
    "DocumentFailed",
    "Done",
    "Event",
    "Forbidden",
    "Invalid",
    "NotFound",
    "Page",
    "PrereadError",
    "RateLimited",
    "Receipt",
    "ServerFailed",
    "Session",
    "SessionDetail",
    "Share",
    "StorageFull",
    "StreamLost",
    "TimedOut",
    "Token",
    "TooLarge",
    "TooLong",
    "Turn",
    "Unauthenticated",
    "Unavailable",
    "UnexpectedResponse",
    "UnsupportedType",
    "Uploaded",
]
