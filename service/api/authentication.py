"""Who a request comes from: the key in `Authorization: Bearer`, or the cookie of a browser that signed in, looked at
before there is a route or a body.

It stands around the router, so that an address without a route tells nothing either, and no handler can be forgotten.
"""

from collections.abc import Callable
from typing import Any

from litestar.types import ASGIApp, Receive, Scope, Send

from service.api.browsers import cookie_of, require_own_page
from service.api.openai.errors import is_openai, refuse_openai
from service.api.problems import refuse
from service.core.audit import acting_with
from service.core.keys import LOCAL_PRINCIPAL, Principal
from service.core.services import Services
from service.errors import ServiceError

OPEN = ("/health/live", "/health/ready", "/app/sign-in", "/app/link", "/app/preferences")
"""What needs no key: load balancers have none, nor who is about to sign in."""
_OPEN_BELOW = "/app/static/"


class Authenticated:
    """Lets through whom the database knows, and says to the handlers who it is."""

    def __init__(self, app: ASGIApp, services: Callable[[], Services]) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        principal = LOCAL_PRINCIPAL
        if scope["path"].rstrip("/") not in OPEN and not scope["path"].startswith(_OPEN_BELOW):
            services = self._services()
            try:
                principal = await _principal(services, scope)
                await services.rates.require(principal.account)
            except ServiceError as error:
                await (refuse_openai if is_openai(scope["path"]) else refuse)(error, scope, send)
                return
        scope["state"]["principal"] = principal
        with acting_with(principal.key_id):
            await self._app(scope, receive, send)


async def _principal(services: Services, scope: Scope) -> Principal:
    """Raises Unauthenticated, Forbidden, DatabaseUnavailable."""
    token = _token(scope)
    # What is no key may be meant for something in front, which asks for a password.
    if token or not await services.keys.required() or (cookie := cookie_of(scope)) is None:
        return await services.keys.principal(token)
    require_own_page(scope)
    return await services.web_sessions.principal(cookie)


def _token(scope: Any) -> str | None:
    """What follows `Bearer`, None without such a header. Empty, which is no key, for another kind and for several: on a
    server without keys they are nothing to it, as when something in front asks for a password and passes it on."""
    given = [value.decode("latin1") for name, value in scope["headers"] if name == b"authorization"]
    if not given:
        return None
    kind, _, token = given[0].partition(" ")
    return token.strip() if len(given) == 1 and kind.lower() == "bearer" else ""
