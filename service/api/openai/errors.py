"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`, with its statuses and
codes."""

import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import ValidationException
from litestar.openapi.datastructures import ResponseSpec
from litestar.types import Scope, Send

from service.api.problems import OpenAIError, headers_of, problem_of
from service.errors import ServiceError

PREFIXES = ("/v1/models", "/v1/files", "/v1/uploads", "/v1/chat", "/v1/responses")
_STATUSES = {415: 400, 422: 400}
_RATE = "rate_limit_exceeded"
_CODES = {
    "unauthenticated": "invalid_api_key",
    "invalid_key": "invalid_api_key",
    "rate_limited": _RATE,
    "queue_full": _RATE,
    "quota_questions": _RATE,
    "quota_documents": "insufficient_quota",
    "quota_bytes": "insufficient_quota",
    "quota_tokens_per_day": "insufficient_quota",
    "invalid": "invalid_value",
}
_PARAMS = {
    "chat": {"question": "messages", "document_ids": "messages"},
    "responses": {"question": "input", "document_ids": "input", "max_tokens": "max_output_tokens", "messages": "input"},
}
"""What a request calls what the use cases call otherwise."""
_UNKNOWN = re.compile(r"Object contains unknown field `(.+?)`(?: - at `\$\.?(.*)`)?")
_AT = re.compile(r"^(.*?) - at `\$\.?(.*)`$")
_log = structlog.get_logger("preread.api")


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every response of these calls that is not a success."""

    error: OpenAIError


@dataclass(frozen=True, slots=True)
class Told:
    """An error as a client is told."""

    status: int
    error: OpenAIError

    @property
    def body(self) -> ErrorBody:
        return ErrorBody(self.error)


def is_openai(path: str) -> bool:
    """Whether an address is one of these."""
    return path.startswith(PREFIXES)


def told(error: Exception, path: str = "") -> Told:
    """What is said of an exception to a request for `path`."""
    problem = problem_of(error)
    status = _STATUSES.get(problem.status, problem.status)
    message, param, code = problem.detail, problem.error.param, problem.error.code
    if isinstance(error, ValidationException):
        message, param, code = _validation(message, param)
    code = _CODES.get(code or "", code)
    names = next((names for part, names in _PARAMS.items() if path.startswith(f"/v1/{part}")), {})
    param = names.get(param or "", param)
    return Told(status, OpenAIError(message, _type_of(status, code), param or None, code))


def on_openai_error(request: Request[Any, Any, Any], error: Exception) -> Response[ErrorBody]:
    """Litestar's exception handler of these controllers."""
    found = told(error, request.scope["path"])
    if found.status >= 500 and not isinstance(error, ServiceError):
        _log.error("request failed", error=type(error).__name__, exc_info=error)
    return Response(found.body, status_code=found.status, media_type="application/json", headers=headers_of(error))


async def refuse_openai(error: ServiceError, scope: Scope, send: Send) -> None:
    """Answer a request that does not come to the router."""
    found = told(error)
    body = msgspec.json.encode(found.body)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **headers_of(error)}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": found.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def openai_responses(*statuses: int) -> dict[int, ResponseSpec]:
    """What a handler documents as its refusals."""
    return {
        status: ResponseSpec(ErrorBody, generate_examples=False, description=HTTPStatus(status).phrase)
        for status in (400, 401, 403, 404, 429, 503, *statuses)
    }


def _validation(message: str, param: str | None) -> tuple[str, str | None, str]:
    """Of a body that is not as it should be: the reader's message names the place."""
    if unknown := _UNKNOWN.search(message):
        name = f"{unknown[2]}.{unknown[1]}" if unknown[2] else unknown[1]
        return f"There is no parameter `{name}` here: see docs/openai.md.", name, "unknown_parameter"
    if at := _AT.match(message):
        return f"{at[2]}: {at[1]}", at[2] or param, "invalid_value"
    return message, param, "invalid_value"


def _type_of(status: int, code: str | None) -> str:
    if code == "insufficient_quota":
        return code
    if status == 429:
        return "requests"
    return "invalid_request_error" if status < 500 else "server_error"
