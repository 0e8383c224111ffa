"""The service's use cases in this process, for commands that need no server."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from service.cli.output import err
from service.core import datadir
from service.core.adapters import Given, open_adapters
from service.core.engines import open_engine
from service.core.services import Services, open_services
from service.engine.models.card import load_card
from service.settings import Settings


def check_start(settings: Settings) -> None:
    """Tell early, and in a sentence, what would stop a start: no such model, or a data directory in use.

    Raises ModelError, Conflict, OSError.
    """
    if settings.engine != "fake":
        load_card(settings.model_dir)
    datadir.prepare(settings)
    datadir.lock(settings.data_dir, shared=bool(settings.fleet_url)).close()


@asynccontextmanager
async def local_services(settings: Settings) -> AsyncIterator[Services]:
    """Use cases over an engine in this process. What it stores, a server finds, and the reverse.

    Raises as `check_start`.
    """
    _log_failures_only(settings)
    check_start(settings)
    async with AsyncExitStack() as stack:
        with err.status("Loading the model"):
            engine = await open_engine(settings)
        stack.push_async_callback(engine.close)
        adapters = await open_adapters(stack, settings, Given(engine=engine))
        yield await open_services(stack, adapters)


def _log_failures_only(settings: Settings) -> None:
    from service.logs import configure_logging

    level = settings.log_level if "log_level" in settings.model_fields_set else "error"
    configure_logging(settings.model_copy(update={"log_level": level}))
