"""`preread serve`: one process with the API, the jobs and a supervised engine."""

import asyncio
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from litestar import Litestar
from uvicorn._types import ASGIApplication

from cache_store.errors import CacheStoreError
from service.api.hosts import is_loopback
from service.app import create_app
from service.core.adapters import Given
from service.core.keys import admin_token
from service.core.own_database import has_keys
from service.engine.models.errors import ModelError
from service.engine.protocol import EngineLost
from service.errors import Conflict, Invalid, ServiceError
from service.logs import configure_logging
from service.settings import Settings


def run(settings: Settings, given: Given | None = None) -> int:
    """Serve until SIGINT or SIGTERM; the exit status.

    Open streams end with an event that says so; what is open after `shutdown_grace_s` is cut. Raises Invalid for an
    address that others can reach, when there are no keys and `allow_remote` was not said, Conflict when the port is
    taken, and what the start failed with when that is foreseen.
    """
    configure_logging(settings)
    protected = admin_token(settings) is not None or (_is_open(settings) and asyncio.run(has_keys(settings)))
    server, listening = make_server(settings, given, protected=protected)
    with listening, suppress(KeyboardInterrupt, SystemExit):  # uvicorn exits when the start fails
        server.run(sockets=[listening])
    if (failure := _foreseen(server.app)) is not None:
        raise failure
    return 0 if server.started or server.told_to_end else 3


def make_server(
    settings: Settings, given: Given | None = None, *, protected: bool = False
) -> tuple["Server", socket.socket]:
    """A server and the socket it is to run on. `protected`: there are API keys. Raises as `run`."""
    check_address(settings, protected=protected)
    listening = _listen(settings)
    app = create_app(settings, given)
    config = uvicorn.Config(
        _told_by_run(app),
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_s)),
        timeout_keep_alive=30,
        http="h11",  # the other one, httptools, takes headers of any size into memory
        h11_max_incomplete_event_size=64 * 1024,
    )
    return Server(config, app, listening.getsockname()[:2]), listening


def _is_open(settings: Settings) -> bool:
    """Whether others can reach the address, and it was not said that they may: then there have to be keys."""
    return not (settings.allow_remote or is_loopback(settings.host))


def check_address(settings: Settings, *, protected: bool = False) -> None:
    """Raises Invalid when `host` is more than this machine, there are no keys, and `allow_remote` was not said."""
    if protected or not _is_open(settings):
        return
    raise Invalid(
        f"There are no API keys: whoever reaches {settings.host} could read every document. Make one with `preread "
        "keys create`, or listen on 127.0.0.1, or set PREREAD_ALLOW_REMOTE=true (--allow-remote) when something in "
        "front checks who asks.",
        param="host",
    )


class Server(uvicorn.Server):
    """Says where it listens, and tells open streams when it begins to shut down."""

    def __init__(self, config: uvicorn.Config, app, address: tuple[str, int]) -> None:
        super().__init__(config)
        self.app = app
        self._address = address
        self.told_to_end = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self._address
            shown = f"[{host}]" if ":" in host else host
            print(f"Preread listens on http://{shown}:{port}", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.told_to_end = True
        # uvicorn heeds it once the start is over, and that may wait for a worker, or for a model, for minutes.
        if (starting := self.app.state.get("starting")) is not None:
            starting.get_loop().call_soon_threadsafe(starting.cancel)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn ends the lifespan only after every connection is closed, so streams must be told before.
        if services := self.app.state.get("services"):
            services.stopping.set()
        await super().shutdown(sockets)


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        raise Conflict(
            f"Cannot listen on {settings.host} port {settings.port}: {error.strerror}. "
            "Choose another one with --port or PREREAD_PORT.",
            code="address_in_use",
        ) from None
    return listening


def _foreseen(app: Litestar) -> Exception | None:
    failure = app.state.get("failure")
    foreseen = (ServiceError, ModelError, EngineLost, CacheStoreError, OSError)
    return failure if isinstance(failure, foreseen) else None


def _told_by_run(app: Litestar) -> ASGIApplication:
    """The application without the traceback it has for uvicorn's log when its start fails, if that is foreseen or was
    wanted."""

    async def told(scope: Any, receive: Any, send: Any) -> None:
        async def shortened(message: Any) -> None:
            if message["type"] == "lifespan.startup.failed" and (_foreseen(app) or app.state.get("starting")):
                message = {"type": message["type"], "message": ""}
            await send(message)

        await app(scope, receive, shortened if scope["type"] == "lifespan" else send)

    return told
