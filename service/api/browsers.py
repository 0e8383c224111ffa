"""How a browser that signed in is known again: its cookie, and that the page that sent a request is ours.

The API takes the cookie in place of a key. Over HTTPS its name begins with `__Host-`: browsers take such a cookie from
this very host alone, so that no other name of its domain can sign somebody in here as somebody else. Under
`/link/{share_id}/` the same application is seen as whoever has that link: each link has a cookie of its own, which
browsers send to these paths only, so that opening one signs nobody out.
"""

import re
from typing import Any

from litestar.types import Scope

from service.api.hosts import is_loopback, name_of
from service.errors import Forbidden, Unauthenticated

COOKIE, LINK_COOKIE = "preread_session", "preread_link"
HOST_COOKIE = f"__Host-{COOKIE}"
_LINK_PATH = re.compile(r"/link/(shr_[0-9a-z]{8,60})(/.*)")
_HARMLESS = ("GET", "HEAD", "OPTIONS")


def enter_link(scope: Scope) -> None:
    """Take `/link/{share_id}` off the path; `link_of` has it from then on."""
    if match := _LINK_PATH.fullmatch(scope["path"]):
        scope["state"]["link"] = match[1]
        scope["path"] = match[2]
        scope["raw_path"] = match[2].encode()


def link_of(scope: Any) -> str | None:
    """Id of the link by which somebody comes."""
    return scope["state"].get("link")


def base_of(scope: Any) -> str:
    """What stands before every path of the page: empty, or `/link/{share_id}`."""
    link = link_of(scope)
    return f"/link/{link}" if link else ""


def path_of(scope: Any) -> str:
    """Of a page, with the query: which documents are asked about is there."""
    query = scope["query_string"].decode("latin1")
    return scope["path"] + (f"?{query}" if query else "")


def cookie_of(scope: Any) -> str | None:
    """The value of the cookie that stands for the key, or for the link. Raises Unauthenticated for a link without."""
    if not link_of(scope):
        return session_of(scope)
    found = cookies(scope).get(LINK_COOKIE)
    if found is None:
        raise Unauthenticated("Open the link again, as it was given to you.", code="signed_out")
    return found


def session_of(scope: Any) -> str | None:
    """The value of the cookie of who signed in. The one without prefix, which other names of the domain can set, counts
    only where browsers take no other: over plain HTTP, and on this machine."""
    found = cookies(scope)
    return found.get(HOST_COOKIE) or (None if _is_surely_encrypted(scope) else found.get(COOKIE))


def is_encrypted(scope: Any) -> bool:
    """Whether the browser came by HTTPS, also through a proxy that does not say so: forms say where they are from."""
    return scope["scheme"] == "https" or _header(scope, b"origin").startswith("https://")


def _is_surely_encrypted(scope: Any) -> bool:
    """As `is_encrypted`, but also for a request that says nothing of where it is from. Browsers send `Sec-Fetch-Site`
    over HTTPS, and without it to their own machine alone."""
    host = _header(scope, b"host")
    return is_encrypted(scope) or (bool(_header(scope, b"sec-fetch-site")) and not is_loopback(name_of(host)))


def cookies(scope: Any) -> dict[str, str]:
    """All of a request. `http.cookies` would give up at the first odd one, which another service on the same host may
    have set."""
    sent = [value.decode("latin1") for name, value in scope["headers"] if name == b"cookie"]
    pairs = [each.strip().partition("=") for header in sent for each in header.split(";")]
    return {name: value for name, _, value in pairs if name}


def require_own_page(scope: Any) -> None:
    """Browsers send cookies along whatever page a request comes from: what changes something must come from ours.
    Raises Forbidden."""
    if scope["method"] in _HARMLESS:
        return
    site, host = _header(scope, b"sec-fetch-site"), _header(scope, b"host")
    origin = _header(scope, b"origin").partition("://")[2]
    if site != "same-origin" and not (not site and host and origin == host):
        raise Forbidden("The request does not come from this server's own page.", code="origin_not_allowed")


def _header(scope: Any, name: bytes) -> str:
    """The last one of a name, in small letters; "" without."""
    found = [value for each, value in scope["headers"] if each == name]
    return found[-1].decode("latin1").strip().lower() if found else ""
