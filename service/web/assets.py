"""Style, scripts and icon: a few files, read once, known by name, so that no path is ever made of a request."""

from hashlib import blake2b
from pathlib import Path
from typing import Any

from litestar import Controller, Request, Response, get
from litestar.params import FromPath

from service.errors import NotFound

_FOLDER = Path(__file__).with_name("static")
_KINDS = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


def _read() -> dict[str, tuple[bytes, str, str]]:
    """Content, media type and ETag by name."""
    found = {}
    for path in _FOLDER.iterdir():
        if path.suffix in _KINDS:
            content = path.read_bytes()
            found[path.name] = content, _KINDS[path.suffix], f'"{blake2b(content, digest_size=12).hexdigest()}"'
    return found


_ASSETS = _read()


class AssetController(Controller):
    """Files of the page itself, which are the same for everybody."""

    path = "/app/static"
    include_in_schema = False
    opt = {"public": True}  # noqa: RUF012 - Litestar reads this class attribute

    @get("/{name:str}")
    async def asset(self, request: Request[Any, Any, Any], name: FromPath[str]) -> Response[bytes]:
        """Looked at again each time: a changed page never runs with an old script."""
        if name not in _ASSETS:
            raise NotFound("There is no such file.")
        content, kind, etag = _ASSETS[name]
        headers = {"ETag": etag, "Cache-Control": "no-cache", "Content-Type": kind}
        # What compresses on the way makes a weak one of it.
        known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
        if etag in known:
            return Response(b"", status_code=304, headers=headers)
        return Response(content, headers=headers)
