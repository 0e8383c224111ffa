"""What is waited for to its end, whoever ends the waiting: a thread goes on when nobody awaits it any more."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def ended(work: "asyncio.Future[T]", told: Callable[[int], None] = lambda times: None) -> bool:
    """Wait until it has ended, well or not; whether somebody ended the waiting before that. `told`: how often they did,
    each time."""
    times = 0
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            times += 1
            told(times)
    return times > 0


async def to_end(work: "asyncio.Future[T]") -> T:
    """Its result. Raises CancelledError when somebody ended the waiting, but only after it has ended."""
    if await ended(work):
        if not work.cancelled():
            work.exception()  # else asyncio tells of an exception that nobody saw
        raise asyncio.CancelledError
    return work.result()


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As asyncio.to_thread, but who is cancelled goes on only when the thread no longer does: what it writes is not to
    appear after it was removed, nor beside what is measured next."""
    return await to_end(asyncio.get_running_loop().run_in_executor(None, partial(function, *args, **kwargs)))
