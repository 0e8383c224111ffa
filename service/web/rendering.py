"""Templates, and what every one of them knows: language, theme, who looks, and the place of the page."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import jinja2
from litestar import Request, Response

from service.api.browsers import base_of, cookies, path_of
from service.core.keys import MANAGE, READ, Principal
from service.errors import Invalid
from service.web.catalogue import LANGUAGES, Catalogue, browser_messages, language_of

LANGUAGE_COOKIE, THEME_COOKIE = "preread_language", "preread_theme"
THEMES = ("auto", "light", "dark")
_environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(request: Request[Any, Any, Any], template: str, *, status: int = 200, **values: Any) -> Response[str]:
    """A page, or a part of one."""
    text = _environment.get_template(template).render(**_known(request), **values)
    return Response(text, status_code=status, media_type="text/html")


def language(request: Request[Any, Any, Any]) -> str:
    chosen = cookies(request.scope).get(LANGUAGE_COOKIE)
    return language_of(chosen, request.headers.get("accept-language", ""))


def base(request: Request[Any, Any, Any]) -> str:
    """What stands before paths of the page: empty but for links."""
    return base_of(request.scope)


async def form_of(request: Request[Any, Any, Any]) -> dict[str, str]:
    """Fields of a form that was sent; the last of a name counts. Raises Invalid for more than any form of ours has."""
    body = await request.body()
    try:
        return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=100))
    except ValueError:
        raise Invalid("The form has more than 100 fields.") from None


def own_path(path: str) -> str:
    """A path of this server, for a redirect; the first page for what is none."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() else "/"


def _known(request: Request[Any, Any, Any]) -> dict[str, Any]:
    chosen, theme = language(request), cookies(request.scope).get(THEME_COOKIE, "auto")
    catalogue = Catalogue(chosen)
    principal: Principal | None = request.scope["state"].get("principal")
    return {
        "base": base(request),
        "lang": chosen,
        "languages": LANGUAGES,
        "theme": theme if theme in THEMES else "auto",
        "themes": THEMES,
        "here": base(request) + path_of(request.scope),
        "heartbeat_s": request.app.state.services.settings.sse_heartbeat_s,
        "t": catalogue.t,
        "tn": catalogue.tn,
        "known": catalogue.known,
        "browser_messages": browser_messages(chosen),
        "may_manage": principal is not None and MANAGE in principal.scopes,
        "may_read": principal is not None and READ in principal.scopes,
        "is_link": principal is not None and principal.is_link,
        "signed_in": principal is not None and principal.key_id is not None and not principal.is_link,
        "size": _size,
        "moment": _moment,
    }


def _size(nbytes: int) -> str:
    """In decimal units, as file managers show it."""
    if nbytes < 1000:
        return f"{nbytes} B"
    for unit in ("kB", "MB", "GB"):
        nbytes_of_unit = nbytes / 1000
        if nbytes_of_unit < 1000 or unit == "GB":
            return f"{nbytes_of_unit:.{0 if nbytes_of_unit >= 10 else 1}f} {unit}"
        nbytes = round(nbytes_of_unit)
    raise AssertionError


def _moment(seconds: float) -> str:
    """ISO 8601; the ES module puts it into the reader's own words."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
