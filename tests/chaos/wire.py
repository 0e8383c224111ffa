"""A TCP proxy before a server whose connections can be refused, reset in the middle of a reply, or stand still."""

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from tests.cache_store.tiers.servers import free_port

_PIECE = 1 << 16


class Wire:
    """Clients connect to `port`; `set` says what becomes of them: "" all is well, "refuse", "reset", "stall".

    "reset" lets requests through and cuts their replies in half, so that whoever asked cannot know what was done.
    """

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self.n_faults = 0
        self._target_port = target_port
        self._fault = ""
        self._writers: set[asyncio.StreamWriter] = set()
        self._listening: socket.socket | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._do(self._set(""))

    def set(self, fault: str) -> None:
        self._do(self._set(fault))

    def turn_to(self, port: int, *, reset: bool = False) -> None:
        """New connections go to another server; those that are open stay where they are, or are `reset`."""
        self._target_port = port
        if reset:
            self.set("refuse")
            self.set("")

    def close(self) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _listen(self) -> None:
        """Not by a server of asyncio: one that is closed forgets a connection that it was just accepting."""
        self._listening = socket.create_server(("127.0.0.1", self.port), backlog=100)
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._accept, self._listening)

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            accepted, _ = listening.accept()
            accepted.setblocking(False)
            task = self._loop.create_task(self._begin(accepted))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _begin(self, accepted: socket.socket) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=accepted)
        except OSError:
            accepted.close()
        else:
            await self._serve(reader, writer)

    async def _set(self, fault: str) -> None:
        self._fault = fault
        if fault == "stall":
            self._flowing.clear()
        else:
            self._flowing.set()
        if fault == "refuse":
            self._refuse()
        elif self._listening is None:
            self._listen()

    def _refuse(self) -> None:
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening.close()
        self._listening = None
        for writer in list(self._writers):
            self._reset(writer)

    async def _end(self) -> None:
        await self._set("")
        self._refuse()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        self._writers.add(writer)
        try:
            there, to_server = await asyncio.open_connection("127.0.0.1", self._target_port)
            ends.append(to_server)
            self._writers.add(to_server)
            pumps = [
                asyncio.create_task(self._pump(reader, to_server, ends, is_reply=False)),
                asyncio.create_task(self._pump(there, writer, ends, is_reply=True)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.wait(pumps)
        except OSError:  # the server is gone
            self._reset(writer)
        finally:
            for end in ends:
                self._writers.discard(end)
                with suppress(OSError):
                    end.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ends: list[Any], *, is_reply: bool
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_PIECE):
                await self._flowing.wait()
                if is_reply and self._fault == "reset":
                    writer.write(data[: len(data) // 2])
                    for end in ends:
                        self._reset(end)
                    return
                writer.write(data)
                await writer.drain()

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        """End it as a machine does that knows nothing of the connection."""
        self.n_faults += 1
        sock = writer.transport.get_extra_info("socket")
        with suppress(OSError):
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
