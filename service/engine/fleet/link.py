"""One connection to Redis: commands in order, replies in order, several callers at once.

redis-py makes the connection (addresses, passwords, TLS) and parses; its own client would cost ten times the
processor time per command, and cannot have several commands of several callers under way.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

Command = Sequence[bytes | str | int]
CONNECT_S = 1.0


class LinkDown(Exception):
    """Redis cannot be reached, or did not answer in time. What was sent may have been done."""


class FleetSettings(Exception):
    """PREREAD_FLEET_URL is no address of a Redis."""


class Link:
    """Connects when it is first asked, and again after a failure. Raises FleetSettings for a URL that is none."""

    def __init__(self, url: str, *, timeout_s: float = 5.0) -> None:
        try:
            self._pool = ConnectionPool.from_url(
                url, protocol=2, socket_connect_timeout=CONNECT_S, retry=Retry(NoBackoff(), 0), health_check_interval=0
            )
            self._pool.make_connection()  # options are looked at here, not by `from_url`
        except (RedisError, TypeError, ValueError) as error:
            raise FleetSettings(f"PREREAD_FLEET_URL: {error}") from None
        self._timeout_s = timeout_s
        self._connection: Any = None
        self._connecting = asyncio.Lock()
        self._pending: deque[tuple[int, list[Any], asyncio.Future[list[Any]]]] = deque()
        self._reader: asyncio.Task[None] | None = None

    async def ask(self, *commands: Command, timeout_s: float | None = None) -> list[Any]:
        """Send commands in one piece; their replies. A command that Redis refused has a ResponseError in its place.

        Raises LinkDown; another call connects again.
        """
        connection = await self._connected()
        packed = pack(commands)
        done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._pending.append((len(commands), [], done))
        try:
            async with asyncio.timeout(timeout_s or self._timeout_s):
                await connection.send_packed_command(packed, check_health=False)
                return await done
        except (RedisError, OSError, TimeoutError) as error:
            await self._drop(connection, error)
            raise LinkDown(str(error) or "no answer in time") from None
        except asyncio.CancelledError:
            if not done.done():
                done.cancel()  # the reply is read and thrown away
            raise

    async def close(self) -> None:
        """Give up the connection; whoever asks again connects again."""
        await self._drop(self._connection, LinkDown("closed"))

    async def _connected(self) -> Any:
        if self._connection is not None:
            return self._connection
        async with self._connecting:
            if self._connection is None:
                connection = self._pool.make_connection()
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await connection.connect()
                except (RedisError, OSError, TimeoutError) as error:
                    await connection.disconnect(nowait=True)
                    raise LinkDown(str(error) or "no connection in time") from None
                self._connection = connection
                self._reader = asyncio.create_task(self._read(connection, self._pending))
            return self._connection

    async def _read(self, connection: Any, pending: deque[Any]) -> None:
        try:
            while True:
                try:
                    reply = await connection.read_response(disable_decoding=True, disconnect_on_error=False)
                except ResponseError as error:
                    reply = error
                wanted, replies, done = pending[0]
                replies.append(reply)
                if len(replies) == wanted:
                    pending.popleft()
                    if not done.done():
                        done.set_result(replies)
                if isinstance(reply, ResponseError) and _took_over(reply):
                    # Another server took over, and this one stays connected: only a new connection finds that one.
                    await self._drop(connection, reply)
                    return
        except (RedisError, OSError, IndexError) as error:
            await self._drop(connection, error)

    async def _drop(self, connection: Any, error: BaseException) -> None:
        """Give up a connection: whoever waits for a reply is told."""
        if connection is None or connection is not self._connection:
            return
        reader, pending = self._reader, self._pending
        self._connection, self._reader, self._pending = None, None, deque()
        for _, _, done in pending:
            if not done.done():
                done.set_exception(LinkDown(str(error) or "the connection ended"))
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()
            await asyncio.wait((reader,))
        with suppress(RedisError, OSError):
            await connection.disconnect(nowait=True)


def pack(commands: Sequence[Command]) -> bytes:
    """Commands as Redis reads them. redis-py takes several times as long, which counts with hundreds of streams."""
    parts: list[bytes] = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for part in command:
            value = part if isinstance(part, bytes) else str(part).encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(value), value))
    return b"".join(parts)


def server_of(info: Any) -> str:
    """The id of the server's run that wrote a reply to INFO: another one after a restart, and on another machine. Empty
    where it does not say."""
    text = info.decode(errors="replace") if isinstance(info, bytes) else ""
    return next((line[7:].strip() for line in text.splitlines() if line.startswith("run_id:")), "")


def _took_over(error: ResponseError) -> bool:
    """Whether a server refuses because another one is, or will be, in its place. Before Redis 7 the reason why a script
    failed stands in the middle."""
    return isinstance(error, ReadOnlyError) or any(sign in str(error) for sign in ("-READONLY ", "NOREPLICAS "))


def refused(replies: Sequence[Any]) -> ResponseError | None:
    """The first of the commands that Redis refused, as it does when its memory is full."""
    return next((reply for reply in replies if isinstance(reply, ResponseError)), None)
