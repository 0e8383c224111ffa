"""The application: use cases built in the lifespan, closed in reverse."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from litestar import Controller, Litestar
from litestar.di import Provide
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, YamlRenderPlugin

from service.api.principal import owner_id
from service.api.problems import on_error
from service.api.routes import CONTROLLERS
from service.core import datadir
from service.core.clock import Clock, SystemClock
from service.core.services import Services
from service.db.engine import Database
from service.db.migrations import upgrade
from service.engine.protocol import EngineClient
from service.errors import Unavailable
from service.settings import Settings

MAX_BODY_BYTES = 1 << 20
"""Of every request but an upload."""


def create_app(
    settings: Settings,
    *,
    engine: EngineClient | None = None,
    clock: Clock | None = None,
    controllers: Sequence[type[Controller]] = (),
) -> Litestar:
    """The API over `settings`. An `engine` given here is used and not closed; without one it is started.

    `app.state.services` holds the `Services` while the application runs.
    """

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.services = await open_services(stack, settings, engine, clock or SystemClock())
            yield

    return Litestar(
        route_handlers=[*CONTROLLERS, *controllers],
        lifespan=[lifespan],
        dependencies={
            "services": Provide(_services, sync_to_thread=False),
            "owner_id": Provide(owner_id, sync_to_thread=False),
        },
        exception_handlers={Exception: on_error},
        request_max_body_size=MAX_BODY_BYTES,
        openapi_config=OpenAPIConfig(
            title="Preread",
            version="1",
            path="/schema",
            render_plugins=[JsonRenderPlugin(), YamlRenderPlugin()],
        ),
        logging_config=None,
    )


async def open_services(
    stack: AsyncExitStack, settings: Settings, engine: EngineClient | None, clock: Clock
) -> Services:
    """Build every use case on `stack`, which closes them in reverse. Migrates a SQLite database."""
    datadir.prepare(settings)
    stack.enter_context(datadir.lock(settings.data_dir))
    if settings.sqlalchemy_url.startswith("sqlite"):
        await upgrade(settings.sqlalchemy_url)
    db = Database(settings.sqlalchemy_url)
    stack.push_async_callback(db.close)
    if engine is None:
        raise Unavailable("This build starts no engine by itself: pass one to create_app.")
    return Services(settings=settings, clock=clock, db=db, engine=engine)


def _services(state: Any) -> Services:
    return state.services
