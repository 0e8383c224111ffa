"""One error body for everyone: RFC 9457 members, and an `error` member as OpenAI clients read it.

The only place where an error of the use cases meets an HTTP status.
"""

import re
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.openapi.datastructures import ResponseSpec
from litestar.types import Scope, Send

from service import errors
from service.errors import ServiceError

PROBLEM_JSON = "application/problem+json"
TYPE_BASE = "urn:preread:problem:"
_FIELD_OF_BODY = re.compile(r"Object (?:contains unknown|missing required) field `(.*)`")
"""As msgspec says it of the body itself; of what is in it, it says where."""

_STATUS: dict[type[ServiceError], int] = {
    errors.Malformed: 400,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.Gone: 410,
    errors.TooLarge: 413,
    errors.Unsupported: 415,
    errors.Invalid: 422,
    errors.Busy: 429,
    errors.Unavailable: 503,
    errors.StorageFull: 507,
    ServiceError: 500,
}
_TITLES = {
    "not_found": "There is no such thing, or it is not yours",
    "context_length_exceeded": "It does not fit the model's context",
    "unauthenticated": "An API key is needed",
    "invalid_key": "The API key is not valid",
    "scope_missing": "The API key is not for this",
    "quota_documents": "Your quota of documents is used up",
    "quota_bytes": "Your quota of bytes is used up",
    "quota_tokens_per_day": "Your tokens of today are used up",
    "quota_questions": "Too many of your questions are being answered",
    "rate_limited": "Too many requests",
    "queue_full": "Too many answers are running and waiting",
    "engine_unavailable": "The engine is not available",
    "database_unavailable": "The database is not available",
    "storage_full": "There is no room left on the disk",
    "internal_error": "The server failed",
}
_DETAILS = {
    404: "There is nothing at this address; /schema has all calls.",
    405: "This address does not take that method; the header `Allow` names those that it takes.",
}
_log = structlog.get_logger("preread.api")


class OpenAIError(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of every response that is not a success. `instance` is the request's id, found in the log too."""

    type: str
    title: str
    status: int
    detail: str
    error: OpenAIError
    instance: str = ""
    errors: list[dict[str, str]] = []


def problem_of(error: Exception, instance: str = "") -> Problem:
    """The problem an exception is told as; unexpected ones keep their text to themselves."""
    if isinstance(error, ServiceError):
        return _problem(_status_of(error), error.code, error.detail, instance, param=error.param)
    if isinstance(error, HTTPException):
        return _from_litestar(error, instance)
    detail = "Something failed in the server; the log has it under this request's id."
    return _problem(500, "internal_error", detail, instance)


def told_in_stream(error: Exception) -> dict[str, Any]:
    """The problem as the `error` event of a stream: with what a client needs to try again, for it has no headers."""
    retry_after_s = getattr(error, "retry_after_s", None)
    retry = {"retryable": retry_after_s is not None, "retry_after_s": retry_after_s}
    return {**msgspec.to_builtins(problem_of(error)), **retry}


def headers_of(error: Exception) -> dict[str, str]:
    """`Retry-After` where trying again makes sense, `WWW-Authenticate` where a key is missing, `Allow` where the method
    was wrong."""
    if isinstance(error, errors.Unauthenticated):
        known = ', error="invalid_token"' if error.code == "invalid_key" else ""
        return {"WWW-Authenticate": f'Bearer realm="preread"{known}'}
    if isinstance(error, errors.Busy | errors.Unavailable):
        return {"Retry-After": str(error.retry_after_s)}
    return dict(error.headers or {}) if isinstance(error, HTTPException) else {}


def on_error(request: Request[Any, Any, Any], error: Exception) -> Response[Problem]:
    """Litestar's exception handler for everything."""
    problem = _noted(problem_of(error, request_id_of(request)), error)
    return Response(problem, status_code=problem.status, media_type=PROBLEM_JSON, headers=headers_of(error))


def _noted(problem: Problem, error: Exception) -> Problem:
    if problem.status >= 500 and not isinstance(error, ServiceError):
        _log.error("request failed", error=type(error).__name__, exc_info=error)
    return problem


async def refuse(error: Exception, scope: Scope, send: Send) -> None:
    """Answer a request that does not come to the router."""
    problem = _noted(problem_of(error, scope.get("state", {}).get("request_id", "")), error)
    body = msgspec.json.encode(problem)
    headers = {"content-type": PROBLEM_JSON, "content-length": str(len(body)), **headers_of(error)}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def problem_responses(*statuses: int) -> dict[int, ResponseSpec]:
    """What a handler documents as its refusals."""
    return {
        status: ResponseSpec(
            Problem,
            generate_examples=False,
            description=HTTPStatus(status).phrase,
            media_type=PROBLEM_JSON,  # type: ignore[arg-type]
        )
        for status in (400, 401, 403, 429, 503, *statuses)
    }


def request_id_of(request: Request[Any, Any, Any]) -> str:
    return request.scope.get("state", {}).get("request_id", "")


def _status_of(error: ServiceError) -> int:
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)


def _from_litestar(error: HTTPException, instance: str) -> Problem:
    status = error.status_code
    if not isinstance(error, ValidationException):
        code = HTTPStatus(status).phrase.lower().replace(" ", "_")
        if status >= 500:
            return _problem(status, "internal_error", HTTPStatus(status).phrase, instance)
        phrase = HTTPStatus(status).phrase
        detail = error.detail if error.detail not in ("", phrase) else _DETAILS.get(status, phrase)
        return _problem(status, code, detail, instance)
    fields = [_field(item) for item in error.extra or [] if isinstance(item, dict)]
    detail = "; ".join(f"{f['param']}: {f['message']}" if f["param"] else f["message"] for f in fields)
    param = fields[0]["param"] if fields else None
    return _problem(422, "invalid", detail or error.detail, instance, param=param, fields=fields)


def _field(item: dict[str, Any]) -> dict[str, str]:
    """One wrong value. Of the body as a whole the framework's name is `data`, which no caller knows: a field that is
    not known there, or not there, is named."""
    key, message = str(item.get("key", "")), str(item.get("message", ""))
    if key == "data":
        named = _FIELD_OF_BODY.fullmatch(message)
        key = named[1] if named else ""
    return {"param": key, "message": message}


def _problem(
    status: int,
    code: str,
    detail: str,
    instance: str,
    *,
    param: str | None = None,
    fields: list[dict[str, str]] | None = None,
) -> Problem:
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    return Problem(
        type=TYPE_BASE + code,
        title=_TITLES.get(code, HTTPStatus(status).phrase),
        status=status,
        detail=detail,
        instance=f"urn:preread:request:{instance}" if instance else "",
        error=OpenAIError(message=detail, type=kind, param=param or None, code=code),
        errors=fields or [],
    )
