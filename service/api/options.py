"""OPTIONS: Litestar's own answer names only the methods of the first handler of an address."""

from collections import defaultdict
from collections.abc import Iterable

from litestar.datastructures import MutableScopeHeaders
from litestar.routes import BaseRoute
from litestar.types import ASGIApp, Message, Receive, Scope, Send


class AllMethods:
    """Puts into `Allow` what every handler at the address takes."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        methods: dict[str, set[str]] = defaultdict(set)
        for route in routes:
            methods[route.path_format] |= route.methods
        self._allow = {path: ", ".join(sorted(names)) for path, names in methods.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "OPTIONS":
            await self._app(scope, receive, send)
            return

        async def answer(message: Message) -> None:
            allow = self._allow.get(scope.get("path_template", ""))
            if message["type"] == "http.response.start" and allow:
                MutableScopeHeaders.from_message(message)["Allow"] = allow
            await send(message)

        await self._app(scope, receive, answer)
