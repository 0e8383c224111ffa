"""Who a request comes from: the key in `Authorization: Bearer`, looked at before there is a route or a body.

It stands around the router, so that an address without a route tells nothing either, and no handler can be forgotten.
"""

from collections.abc import Callable
from typing import Any

from litestar.types import ASGIApp, Receive, Scope, Send

from service.api.problems import refuse
from service.core.audit import acting_with
from service.core.keys import LOCAL_PRINCIPAL
from service.core.services import Services
from service.errors import ServiceError

_OPEN = ("/health/live", "/health/ready")
"""What needs no key: load balancers have none."""


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
        if scope["path"].rstrip("/") not in _OPEN:
            services = self._services()
            try:
                principal = await services.keys.principal(_token(scope))
                await services.rates.require(principal.account)
            except ServiceError as error:
                await refuse(error, scope, send)
                return
        scope["state"]["principal"] = principal
        with acting_with(principal.key_id):
            await self._app(scope, receive, send)


def _token(scope: Any) -> str | None:
    """What follows `Bearer`, None without such a header. Empty, which is no key, for another kind and for several: on a
    server without keys they are nothing to it, as when something in front asks for a password and passes it on."""
    given = [value.decode("latin1") for name, value in scope["headers"] if name == b"authorization"]
    if not given:
        return None
    kind, _, token = given[0].partition(" ")
    return token.strip() if len(given) == 1 and kind.lower() == "bearer" else ""
