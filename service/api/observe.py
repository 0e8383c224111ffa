"""Around every request, found or not: an id, one log line, the metrics. No bodies, no query, no raw paths."""

import re
import time
from typing import Any

import structlog
from litestar.datastructures import MutableScopeHeaders
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from service.api.metrics import Metrics
from service.api.problems import refuse
from service.core.ids import new_id

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_QUIET = frozenset({"/health/live", "/health/ready", "/metrics"})
_NONE_YET = 499
"""The status of a request whose client left before there was a response."""
_log = structlog.get_logger("preread.http")


class Observed:
    """Wraps the whole router, so that requests without a route are seen too."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _request_id(scope)
        scope["state"]["request_id"] = request_id
        status = _NONE_YET

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableScopeHeaders.from_message(message)["X-Request-ID"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, answer)
            except Exception as error:
                if status != _NONE_YET:
                    raise
                # Litestar's handler of errors stands behind the router, and what looks at a key before it.
                await refuse(error, scope, answer)
            finally:
                self._record(scope, status, time.perf_counter() - started)

    def _record(self, scope: Any, status: int, seconds: float) -> None:
        route = scope.get("path_template") or "unmatched"
        self._metrics.observe(scope["method"], route, status, seconds)
        level = _log.debug if route in _QUIET else _log.info
        level("request", method=scope["method"], route=route, status=status, ms=round(seconds * 1e3, 1))


def _request_id(scope: Any) -> str:
    """The caller's `X-Request-ID` when it is harmless, else a new one."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    text = given.decode("latin1")
    return text if _ID.fullmatch(text) else new_id("req")
