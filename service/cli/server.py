"""uvicorn around the application: one process, and a stop that is told to streams first."""

import asyncio
import socket
from typing import Any

import uvicorn
from litestar import Litestar
from litestar.types import Message, Receive, Scope, Send

from service.settings import Settings


class Server(uvicorn.Server):
    """Serves an application made by `create_app`.

    On SIGTERM or SIGINT open event streams end first, with an event that says so: a connection that stays
    open would keep the process from its shutdown. What then still runs has `shutdown_grace_s`. `failure`
    says why a start failed.
    """

    def __init__(self, app: Litestar, settings: Settings) -> None:
        self._litestar = app
        self.failure: str | None = None
        super().__init__(
            uvicorn.Config(
                self._watch_start,
                host=settings.host,
                port=settings.port,
                log_config=None,
                access_log=False,
                interface="asgi3",
                proxy_headers=False,
                lifespan="on",
                timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_s)),
            )
        )

    @property
    def port(self) -> int:
        """The port it listens on, once it has started."""
        return self.servers[0].sockets[0].getsockname()[1]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        services = getattr(self._litestar.state, "services", None)
        if services is not None:
            services.stopping.set()
            await asyncio.sleep(0)
        await super().shutdown(sockets)

    async def _watch_start(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Any) -> None:
            if message["type"] == "lifespan.startup.failed":
                self.failure = _last_line(message)
                message = {**message, "message": ""}
            await send(message)

        await self._litestar(scope, receive, watched)


def _last_line(message: Message) -> str:
    """The error itself, of a traceback in a lifespan message."""
    lines = str(message.get("message", "")).strip().splitlines() or ["unknown"]
    kind, _, text = lines[-1].partition(": ")
    return text if text and kind.startswith("service.") else lines[-1]
