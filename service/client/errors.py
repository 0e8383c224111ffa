"""What the client raises. Every error is a `PrereadError`, and its text says what to do.

PrereadError
├── ConnectionFailed        the server was not reached, or the connection to it was lost
│   ├── TimedOut            it did not answer in time
│   └── StreamLost          an answer could not be taken up again in time; it says where to go on
├── NoId                    an id that none can be, as an empty one; a ValueError too
├── UnexpectedResponse      what came is not what a Preread server sends
├── DocumentFailed          the document ended as failed or cancelled; `document`
└── APIError                the server refused; `status`, `code`, `detail`, `param`, `retry_after_s`, ...
    ├── BadRequest          400
    ├── Unauthenticated     401: no key, or one that is not valid
    ├── Forbidden           403: the key or the share is not for this
    ├── NotFound            404: no such thing, or neither yours nor shared with you
    ├── Conflict            409: the state does not allow it now
    ├── TooLarge            413
    ├── UnsupportedType     415: a kind of file that the server does not read
    ├── Invalid             422: `param` names the value
    │   └── TooLong         it does not fit the model's context
    ├── RateLimited         429: a queue is full, or a limit reached; `code` says which
    ├── Unavailable         503: the engine or the database is not there now
    ├── StorageFull         507
    └── ServerFailed        any other status of 500 and above
"""

from typing import TYPE_CHECKING

import httpx
import msgspec

if TYPE_CHECKING:
    from service.client.models import Document


class PrereadError(Exception):
    """Base of all errors of the client. `code` is a stable name, `detail` a sentence."""

    code = "error"

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class ConnectionFailed(PrereadError):
    code = "connection_failed"


class TimedOut(ConnectionFailed):
    code = "timed_out"


class StreamLost(ConnectionFailed):
    """The answer may still run on the server: `client.follow(session_id, answer_id, last_event_id)` goes on with it.
    `text` is what had come."""

    code = "stream_lost"

    def __init__(self, detail: str, *, session_id: str, answer_id: str, last_event_id: str, text: str) -> None:
        super().__init__(detail)
        self.session_id = session_id
        self.answer_id = answer_id
        self.last_event_id = last_event_id
        self.text = text


class NoId(PrereadError, ValueError):
    code = "invalid_id"


class UnexpectedResponse(PrereadError):
    code = "unexpected_response"


class DocumentFailed(PrereadError):
    """`document` is as the server has it; `code` says why, or is `cancelled`."""

    def __init__(self, document: "Document") -> None:
        error = document.error
        super().__init__(error.message if error and error.message else f"The document is {document.status}.")
        self.code = error.code if error else document.status
        self.document = document


class ProblemError(msgspec.Struct, frozen=True):
    """The part of a problem that OpenAI clients read."""

    message: str = ""
    type: str = ""
    param: str | None = None
    code: str | None = None


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A refusal's body (`application/problem+json`); of an `error` event of a stream also when to ask again."""

    type: str = ""
    title: str = ""
    status: int = 500
    detail: str = ""
    instance: str = ""
    error: ProblemError = ProblemError()
    errors: list[dict[str, str]] = []
    retryable: bool = False
    retry_after_s: float | None = None


class APIError(PrereadError):
    """The server refused. `instance` names the request in the server's log; `errors` has one entry for each wrong
    field; `retry_after_s` is how long to wait where trying again makes sense."""

    def __init__(self, problem: Problem, retry_after_s: float | None = None) -> None:
        super().__init__(problem.detail or problem.title or f"The server refused with status {problem.status}.")
        self.problem = problem
        self.status = problem.status
        self.code = problem.error.code or problem.type.rpartition(":")[2] or "error"
        self.title = problem.title
        self.param = problem.error.param
        self.instance = problem.instance
        self.errors = problem.errors
        self.retry_after_s = problem.retry_after_s if retry_after_s is None else retry_after_s


class BadRequest(APIError):
    pass


class Unauthenticated(APIError):
    pass


class Forbidden(APIError):
    pass


class NotFound(APIError):
    pass


class Conflict(APIError):
    pass


class TooLarge(APIError):
    pass


class UnsupportedType(APIError):
    pass


class Invalid(APIError):
    pass


class TooLong(Invalid):
    pass


class RateLimited(APIError):
    pass


class Unavailable(APIError):
    pass


class StorageFull(APIError):
    pass


class ServerFailed(APIError):
    pass


_BY_STATUS: dict[int, type[APIError]] = {
    400: BadRequest,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    415: UnsupportedType,
    422: Invalid,
    429: RateLimited,
    503: Unavailable,
    507: StorageFull,
}


def error_of(problem: Problem, retry_after_s: float | None = None) -> APIError:
    """The exception for a problem."""
    kind = _BY_STATUS.get(problem.status, ServerFailed if problem.status >= 500 else APIError)
    if problem.error.code == "context_length_exceeded" and kind is Invalid:
        kind = TooLong
    return kind(problem, retry_after_s)


def refusal(response: httpx.Response) -> APIError:
    """The exception for a response that is not a success, whose body was read: also one that a proxy made."""
    status = response.status_code
    try:
        problem = msgspec.structs.replace(msgspec.json.decode(response.content, type=Problem), status=status)
    except msgspec.MsgspecError:
        detail = f"{response.url.host} answered {status} {response.reason_phrase}, and no Preread server does so."
        problem = Problem(title=response.reason_phrase, status=status, detail=detail)
    wait = response.headers.get("retry-after", "")
    return error_of(problem, float(wait) if wait.isascii() and wait.isdigit() else None)


def failed_connection(error: httpx.TransportError, url: str) -> ConnectionFailed:
    """The exception for a connection that was not made, or lost."""
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        return TimedOut(f"{url} did not answer in time ({type(error).__name__}).")
    if isinstance(error, httpx.ConnectError):
        return ConnectionFailed(f"{url} was not reached: {reason}. Is the server running?")
    return ConnectionFailed(f"The connection to {url} was lost: {reason}.")
