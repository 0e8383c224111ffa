"""Every call of the API as a value, for both clients to send."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypedDict, TypeVar
from urllib.parse import quote

from msgspec import UnsetType

from service.client import models
from service.client.errors import NoId
from service.client.sources import Source

T = TypeVar("T")
Target = Literal["documents", "sessions"]


class Sampling(TypedDict, total=False):
    """How an answer is made; what is left out has the server's default."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    stop: str | list[str] | None
    seed: int | None


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. `result` is what its body is decoded as; `is_repeatable`: whether sending it twice does no more than
    sending it once, so that it may be sent again when its response was lost."""

    method: str
    path: str
    result: type[T]
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    source: Source | None = None
    form: Mapping[str, str] = field(default_factory=dict)
    is_repeatable: bool = True


def upload(source: Source, form: Mapping[str, Any], idempotency_key: str | None) -> Call[models.Uploaded]:
    sent = {name: str(value) for name, value in form.items() if value is not None}
    return Call(
        "POST", "/v1/documents", models.Uploaded, source=source, form=sent, headers=_key(idempotency_key),
        is_repeatable=source.is_rewindable,
    )  # fmt: skip


def list_documents(limit: int, after: str | None, shared: bool) -> Call[models.DocumentList]:
    return Call("GET", "/v1/documents", models.DocumentList, params=_paging(limit, after, shared))


def get_document(document_id: str) -> Call[models.Document]:
    return Call("GET", _of("documents", document_id), models.Document)


def update_document(document_id: str, **changes: Any) -> Call[models.Document]:
    """Those of `changes` that are not UNSET."""
    body = {name: value for name, value in changes.items() if not isinstance(value, UnsetType)}
    return Call("PATCH", _of("documents", document_id), models.Document, body=body)


def delete_document(document_id: str) -> Call[models.Receipt]:
    return Call("DELETE", _of("documents", document_id), models.Receipt, is_repeatable=False)


def cancel_document(document_id: str) -> Call[models.Document]:
    return Call("POST", _of("documents", document_id, "cancel"), models.Document)


def get_page(document_id: str, number: int) -> Call[models.Page]:
    return Call("GET", _of("documents", document_id, "pages", str(number)), models.Page)


def get_file(document_id: str) -> Call[bytes]:
    return Call("GET", _of("documents", document_id, "file"), bytes)


def document_events(document_id: str, last_event_id: str) -> Call[bytes]:
    return Call("GET", _of("documents", document_id, "events"), bytes, headers=_after(last_event_id))


def create_session(document_ids: list[str], title: str, instructions: str) -> Call[models.Session]:
    body = {"document_ids": document_ids, "title": title, "instructions": instructions}
    return Call("POST", "/v1/sessions", models.Session, body=body, is_repeatable=False)


def list_sessions(limit: int, after: str | None, shared: bool) -> Call[models.SessionList]:
    return Call("GET", "/v1/sessions", models.SessionList, params=_paging(limit, after, shared))


def get_session(session_id: str) -> Call[models.SessionDetail]:
    return Call("GET", _of("sessions", session_id), models.SessionDetail)


def delete_session(session_id: str) -> Call[None]:
    return Call("DELETE", _of("sessions", session_id), type(None), is_repeatable=False)


def fork_session(
    session_id: str, after_turn: str | None, title: str | None, instructions: str | None
) -> Call[models.SessionDetail]:
    given = {"after_turn": after_turn, "title": title, "instructions": instructions}
    body = {name: value for name, value in given.items() if value is not None}
    return Call("POST", _of("sessions", session_id, "fork"), models.SessionDetail, body=body, is_repeatable=False)


def ask(session_id: str, question: str, sampling: Sampling, idempotency_key: str | None) -> Call[bytes]:
    """As a stream: its comments tell that the server is there, and it can be taken up again."""
    given = {name: value for name, value in sampling.items() if value is not None}
    body = {"question": question, "stream": True, **given}
    return Call("POST", _of("sessions", session_id, "questions"), bytes, body=body, headers=_key(idempotency_key))


def answer_events(session_id: str, answer_id: str, last_event_id: str) -> Call[bytes]:
    path = _of("sessions", session_id, "questions", answer_id, "events")
    return Call("GET", path, bytes, headers=_after(last_event_id))


def create_share(
    what: Target, id: str, kind: str, user: str | None, access: str, ttl_s: int | None
) -> Call[models.Share]:
    body = {"with": kind, "access": access, "user": user, "ttl_s": ttl_s}
    sent = {name: value for name, value in body.items() if value is not None}
    return Call("POST", _of(what, id, "shares"), models.Share, body=sent, is_repeatable=False)


def list_shares(what: Target, id: str) -> Call[models.ShareList]:
    return Call("GET", _of(what, id, "shares"), models.ShareList)


def revoke_share(what: Target, id: str, share_id: str) -> Call[None]:
    return Call("DELETE", _of(what, id, "shares", share_id), type(None), is_repeatable=False)


def ready() -> Call[bytes]:
    return Call("GET", "/health/ready", bytes)


def _of(what: str, *parts: str) -> str:
    """A path. An empty id would be the address of something else. Raises NoId."""
    for part in parts:
        if part in ("", ".", ".."):
            raise NoId(f"{part!r} is no id.")
    return "/".join(("/v1", what, *(quote(part, safe="") for part in parts)))


def _paging(limit: int, after: str | None, shared: bool) -> dict[str, Any]:
    wanted = {"limit": limit, "after": after, "shared": "true" if shared else None}
    return {name: value for name, value in wanted.items() if value is not None}


def _key(idempotency_key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}


def _after(last_event_id: str) -> dict[str, str]:
    return {"Last-Event-ID": last_event_id} if last_event_id else {}
