"""Sends calls, again where that is safe."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import BinaryIO, TypeVar

import httpx

from service.client.attempts import Attempts
from service.client.calls import Call
from service.client.connection import Connection, request_options, result_of
from service.client.errors import APIError, failed_connection, refusal
from service.client.following import Following
from service.client.sse import Parser

T = TypeVar("T")


class AsyncTransport:
    """One pool of connections, of one event loop."""

    def __init__(self, connection: Connection) -> None:
        self.url = connection.url
        self.patience = connection.patience
        self._http = httpx.AsyncClient(**connection.options())

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, call: Call[T]) -> T:
        """Raises PrereadError."""
        attempts = Attempts(call, self.patience, self.url)
        while True:
            try:
                async with self.opened(call) as response:
                    await response.aread()
                    return result_of(call, response)
            except httpx.TransportError as error:
                wait_s = attempts.after_loss(error)
            except APIError as error:
                wait_s = attempts.after_refusal(error)
            await asyncio.sleep(wait_s)

    async def send_once(self, call: Call[T]) -> T:
        """Without trying again. Raises PrereadError."""
        try:
            async with self.opened(call) as response:
                await response.aread()
                return result_of(call, response)
        except httpx.TransportError as error:
            raise failed_connection(error, self.url) from error

    @asynccontextmanager
    async def opened(self, call: Call) -> AsyncIterator[httpx.Response]:
        """A success whose body was not read yet. Raises APIError, httpx.TransportError."""
        request = self._http.build_request(call.method, call.path, **request_options(call))
        if call.source is not None:
            request.stream = _InThread(request.stream)  # type: ignore[arg-type]
        response = await self._http.send(request, stream=True)
        try:
            if not response.is_success:
                await response.aread()
                raise refusal(response)
            yield response
        finally:
            await response.aclose()

    async def save(self, call: Call[bytes], to: BinaryIO) -> None:
        """Write a body to an empty file while it comes, from its beginning when the connection is lost. Raises
        PrereadError, OSError."""
        attempts = Attempts(call, self.patience, self.url)
        while True:
            try:
                async with self.opened(call) as response:
                    async for piece in response.aiter_bytes():
                        await asyncio.to_thread(to.write, piece)
                    return
            except httpx.TransportError as error:
                if not to.seekable():
                    raise failed_connection(error, self.url) from error
                wait_s = attempts.after_loss(error)
                to.seek(0)
                to.truncate()
            except APIError as error:
                wait_s = attempts.after_refusal(error)
            await asyncio.sleep(wait_s)

    async def follow(self, following: Following[T]) -> AsyncIterator[T]:
        """What a stream tells, taken up again where it was lost. Raises PrereadError."""
        while not following.is_over:
            try:
                async with self.opened(following.call()) as response:
                    following.opened(response)
                    parser = Parser()
                    async for chunk in response.aiter_bytes():
                        for event in parser.feed(chunk):
                            if (told := following.heard(event)) is not None:
                                yield told
                            if following.is_over:
                                return
                if following.is_over:
                    return
                wait_s = following.broken(None)
            except httpx.TransportError as error:
                wait_s = following.broken(error)
            except APIError as error:
                wait_s = following.refused(error)
            await asyncio.sleep(wait_s)


class _InThread(httpx.AsyncByteStream):
    """A body whose file is read in a thread: the event loop does not wait for a disk."""

    def __init__(self, body: Iterable[bytes]) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces = iter(self._body)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece
