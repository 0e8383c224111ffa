"""Threads of which nobody is to be rid before they have ended."""

import asyncio
import time

import pytest

from service.bench.waiting import in_thread


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_time_that_is_over_waits_for_the_thread() -> None:
    ended: list[str] = []

    def slow(name: str) -> None:
        time.sleep(0.2)
        ended.append(name)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await in_thread(slow, "first")
    assert ended == ["first"]


@pytest.mark.anyio
async def test_who_ends_it_twice_waits_too() -> None:
    ended: list[bool] = []
    task = asyncio.create_task(in_thread(lambda: ended.append(not time.sleep(0.2))))
    for _ in range(2):
        await asyncio.sleep(0.02)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


@pytest.mark.anyio
async def test_what_the_thread_says_is_told() -> None:
    assert await in_thread(int, "7") == 7
    with pytest.raises(ValueError, match="invalid literal"):
        await in_thread(int, "seven")
