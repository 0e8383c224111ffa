"""Going on when the database is away for a while: what is under way waits for it, what is new is told so."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from service.errors import DatabaseUnavailable

T = TypeVar("T")

KEEP_S = 60.0
"""How long the end of an answer waits to be kept."""
PAUSE_S = 1.0
_SAY_S = 10.0
"""An outage is told at its start and then so often, not at every try."""
_log = structlog.get_logger("preread.database")


async def through_outages(step: Callable[[], Awaitable[T]], *, within_s: float | None = None) -> T:
    """What `step` gives once the database answers; it is tried again as often as needed.

    Raises DatabaseUnavailable when the database stays away for `within_s` seconds; None waits for ever.
    """
    began = say_at = time.monotonic()
    while True:
        try:
            return await step()
        except DatabaseUnavailable as error:
            now = time.monotonic()
            if within_s is not None and now - began >= within_s:
                raise
            if now >= say_at:
                _log.warning("the database does not answer", place=error.place, waiting_s=round(now - began, 1))
                say_at = now + _SAY_S
            await asyncio.sleep(PAUSE_S)
