"""Who is asking, and whether their key is for what they ask."""

from typing import Any

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from service.core.keys import ASK, MANAGE, METRICS, READ, Principal
from service.db.people import LOCAL
from service.errors import Forbidden

OWNER = LOCAL
"""Whose documents are without keys, and at the terminal."""
FOR_READING, FOR_ASKING, FOR_MANAGING, FOR_METRICS = (
    {"scope": READ}, {"scope": ASK}, {"scope": MANAGE}, {"scope": METRICS}
)  # fmt: skip
"""`opt` of handlers. Without one, what only reads needs `read`, and all else `manage`."""


def principal(request: Request[Any, Any, Any]) -> Principal:
    """Dependency `principal`: as `service.api.authentication` found it."""
    return request.scope["state"]["principal"]


def owner_id(request: Request[Any, Any, Any]) -> str:
    """Dependency `owner_id` of handlers: whose documents and sessions are meant, and who looks at those of others."""
    return principal(request).user_id


def require_scope(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Guard of every handler, before the body is read and before any id is looked up. Raises Forbidden."""
    needed = handler.opt.get("scope") or (READ if connection.scope.get("method") in ("GET", "HEAD") else MANAGE)
    found: Principal = connection.scope["state"]["principal"]
    if needed not in found.scopes and not handler.opt.get("public"):
        has = ", ".join(sorted(found.scopes)) or "none"
        raise Forbidden(f"This needs a key with the scope `{needed}`; yours has: {has}.", code="scope_missing")
