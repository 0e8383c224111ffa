"""How a browser that signed in is known again: its cookie, and that the page that sent a request is ours.

The API takes the cookie in place of a key. Under `/link/{share_id}/` the same application is seen as whoever has that
link: each link has a cookie of its own, which browsers send to these paths only, so that opening one signs nobody out.
"""

import re
from typing import Any

from litestar.types import Scope

from service.errors import Forbidden, Unauthenticated

COOKIE, LINK_COOKIE = "preread_session", "preread_link"
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
    found = cookies(scope).get(LINK_COOKIE if link_of(scope) else COOKIE)
    if found is None and link_of(scope):
        raise Unauthenticated("Open the link again, as it was given to you.", code="signed_out")
    return found


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
    headers = {name: value.decode("latin1").strip().lower() for name, value in scope["headers"]}
    site = headers.get(b"sec-fetch-site")
    host = headers.get(b"host", "")
    origin = headers.get(b"origin", "").partition("://")[2]
    if site != "same-origin" and not (site is None and host and origin == host):
        raise Forbidden("The request does not come from this server's own page.", code="origin_not_allowed")
