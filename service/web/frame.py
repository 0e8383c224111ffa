"""Around every request: what browsers are told about the page, links, and the way to the sign-in.

The policy lets nothing in but our own files. Text of documents and answers is only ever text; should some of it become
markup by a fault of ours, nothing in it would run.
"""

import re
from typing import Any
from urllib.parse import quote

from litestar.datastructures import MutableScopeHeaders
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from service.api.browsers import base_of, enter_link, path_of

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; frame-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # `no-referrer` would make browsers say `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
_PAGE = re.compile(r"/|/app(/.*)?")
_SIGN_OUT = "/app/sign-out"
"""Who is signed in no longer, and says so, gets what they want."""


class Framed:
    """Stands around what looks at keys."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            enter_link(scope)
        if scope["type"] != "http" or not _PAGE.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        redirected = False

        async def framed(message: Message) -> None:
            nonlocal redirected
            if message["type"] == "http.response.start":
                if message["status"] == 401 and (_is_navigation(scope) or scope["path"] == _SIGN_OUT):
                    redirected = True
                    message["status"], message["headers"] = 303, [(b"location", _sign_in(scope).encode())]
                headers = MutableScopeHeaders.from_message(message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            elif redirected and message["type"] == "http.response.body":
                message["body"] = b""
            await send(message)

        await self._app(scope, receive, framed)


def _is_navigation(scope: Any) -> bool:
    """Whether somebody looks at a page, rather than a part of one being fetched."""
    headers = dict(scope["headers"])
    return scope["method"] == "GET" and b"hx-request" not in headers and b"text/html" in headers.get(b"accept", b"")


def _sign_in(scope: Scope) -> str:
    if base_of(scope):
        return "/app/link"
    led_to = "/" if scope["path"] == _SIGN_OUT else path_of(scope)
    return f"/app/sign-in?next={quote(led_to, safe='/')}" if led_to != "/" else "/app/sign-in"
