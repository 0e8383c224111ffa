"""The application: use cases built in the lifespan, closed in reverse."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import structlog
from litestar import Controller, Litestar, Response, Router
from litestar.datastructures import State
from litestar.di import Provide
from litestar.openapi.plugins import JsonRenderPlugin, YamlRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme

from service.api.authentication import Authenticated
from service.api.hosts import Guarded
from service.api.metrics import Metrics
from service.api.observe import Observed
from service.api.openapi import Description
from service.api.options import AllMethods
from service.api.principal import owner_id, principal, require_scope
from service.api.problems import on_error
from service.api.requests import ApiRequest
from service.api.routes import CONTROLLERS
from service.core.adapters import Given, open_adapters
from service.core.services import Services, open_services
from service.errors import NotFound
from service.settings import Settings
from service.web import routes as web
from service.web.frame import Framed

_log = structlog.get_logger("preread.serve")
MAX_BODY_BYTES = 1 << 20
"""Of every request but an upload."""
_KEY = SecurityScheme(type="http", scheme="bearer", description="A server that has no keys wants none.")


def create_app(
    settings: Settings, given: Given | None = None, *, controllers: Sequence[type[Controller]] = ()
) -> Litestar:
    """The API over `settings`; `given` parts are used as they are.

    `app.state.services` holds the `Services` while the application runs, `failure` why it could not start, `starting`
    the task that starts it: cancelled, it gives up.
    """

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.starting = asyncio.current_task()
            try:
                adapters = await open_adapters(stack, settings, given or Given())
                services = app.state.services = await open_services(stack, adapters)
                if not await services.keys.is_any():
                    _log.warning(
                        "there are no API keys: whoever reaches this server may do everything", host=settings.host
                    )
            except Exception as error:
                app.state.failure = error
                raise
            app.state.starting = None
            yield

    metrics = Metrics()
    app = Litestar(
        route_handlers=[*CONTROLLERS, *web.CONTROLLERS, *controllers],
        lifespan=[lifespan],
        dependencies={
            "services": Provide(_services, sync_to_thread=False),
            "owner_id": Provide(owner_id, sync_to_thread=False),
            "principal": Provide(principal, sync_to_thread=False),
            "metrics": Provide(lambda: metrics, sync_to_thread=False),
        },
        guards=[require_scope],
        exception_handlers={Exception: on_error},
        request_class=ApiRequest,
        request_max_body_size=MAX_BODY_BYTES,
        openapi_config=Description(
            title="Preread",
            version="1",
            security=[{"key": []}],
            use_handler_docstrings=True,
            components=Components(security_schemes={"key": _KEY}),
            openapi_router=Router("/schema", route_handlers=[], include_in_schema=False, after_request=_found),
            render_plugins=[JsonRenderPlugin(), YamlRenderPlugin()],
        ),
        logging_config=None,
    )
    # Litestar's own middleware never sees a request that has no route.
    authenticated = Authenticated(AllMethods(app.asgi_handler, app.routes), lambda: _services(app.state))
    app.asgi_handler = Observed(Guarded(Framed(authenticated), settings), metrics)
    return app


def _services(state: State) -> Services:
    return state.services


def _found(response: Response) -> Response:
    """Litestar answers with a page of HTML where there is no such form of the schema."""
    if response.status_code == 404:
        raise NotFound("There is no such form of the schema: /schema/openapi.json and /schema/openapi.yaml are there.")
    return response
