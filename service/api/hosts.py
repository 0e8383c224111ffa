"""Who a request is for, and which page sent it. Web pages are kept away from a server without API keys.

A page somewhere on the web can have its own name resolve to 127.0.0.1 (DNS rebinding): then a browser takes our
answers for that page's own. The `Host` header still has the page's name. And a page can send forms to us without
reading the answers: the browser then says in `Origin` which page it was.
"""

import ipaddress
import re

from litestar.types import ASGIApp, Receive, Scope, Send

from service.api.problems import refuse
from service.errors import Forbidden
from service.settings import Settings

_HOST = re.compile(r"(\[[^\]]+\]|[^:@/]+)(?::\d*)?")


class Guarded:
    """Lets through what is for this server and not from another site's page."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        named = frozenset(name.strip().lower() for name in settings.allowed_hosts.split(",") if name.strip())
        self._any = "*" in named
        self._any_host = self._any or (not named and not is_loopback(settings.host))
        self._named = named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._any and (refusal := self._refusal(scope)):
            await refuse(refusal, scope, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Forbidden | None:
        hosts, origins = _headers(scope, b"host"), _headers(scope, b"origin")
        if not self._any_host and not all(self._is_ours(host) for host in hosts):
            return Forbidden(
                "This server is not known by the name in the request's Host header. Name it in "
                "PREREAD_ALLOWED_HOSTS, or ask for localhost.",
                code="host_not_allowed",
            )
        if not all(self._is_own_page(origin, hosts) for origin in origins):
            return Forbidden(
                "The request comes from a page of another site (its Origin header says so). Name that page's host in "
                "PREREAD_ALLOWED_HOSTS if it is yours.",
                code="origin_not_allowed",
            )
        return None

    def _is_ours(self, host: str) -> bool:
        name = name_of(host)
        # Only requests made by hand have no host: every browser sends one.
        return not host or name in self._named or is_loopback(name)

    def _is_own_page(self, origin: str, hosts: list[str]) -> bool:
        authority = origin.partition("://")[2]
        return bool(authority) and (authority in hosts or name_of(authority) in self._named)


def is_loopback(host: str) -> bool:
    """Whether only this machine is reached by this name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def name_of(host: str) -> str:
    """Without the port; empty for what is no host."""
    match = _HOST.fullmatch(host)
    return match[1].strip("[]").removesuffix(".") if match else ""


def _headers(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin1").strip().lower() for name, value in scope["headers"] if name == wanted]
