"""Who works on what, when several processes share a database.

A process has a row with a count of its signs of life; documents and answers name the process that works on them. A
process whose count does not change is given up by whoever watched it for `lease_s` seconds by a clock of its own, so
that no clock of the world is asked, and a jump of one does nothing. Its row is removed, its work is free for others.
A process that was frozen and finds its row gone drops what it did, and begins a new life. What it wrote in between
counted for nothing: rows are only changed by the process that they name.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import structlog

from service.core.clock import Clock
from service.db.engine import Database
from service.errors import DatabaseUnavailable, Unavailable

BEATS = 4
"""Signs of life in the time after which a process is given up."""
MOST_OF_A_LOOK = 0.5
"""Of that time, what passes between two looks at others counts no more than this part: a machine that stood still has
stopped the signs of life of its other processes too, and they get the time to give one."""
FRESH = 0.6
"""A process whose last sign of life is older than this part of the time gives another one before it begins work."""
Listener = Callable[[], Awaitable[None]]
_log = structlog.get_logger("preread.leases")


class Leases:
    """`alone`: no other process can use the database (its folder is locked), and nothing has to be kept alive.

    `lost` are called when others have given this process up, `each_beat` after each sign of life.
    """

    def __init__(self, db: Database, clock: Clock, *, alone: bool, lease_s: float) -> None:
        self._db = db
        self._clock = clock
        self.alone = alone
        self.lease_s = lease_s
        self.owner = _new_owner()
        self.lost: list[Listener] = []
        self.each_beat: list[Listener] = []
        self._beaten_at = 0.0
        self._watched: dict[str, tuple[int, float]] = {}
        self._looked_at = clock.monotonic()
        self._watched_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def register(self) -> None:
        """Be there. Raises DatabaseUnavailable."""
        async with self._db.writing() as uow:
            if self.alone:
                await uow.processes.remove_all()
            await uow.processes.add(self.owner)
        self._beaten_at = self._clock.monotonic()

    def start(self) -> None:
        """Begin to give signs of life and to watch those of others."""
        if not self.alone:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Leave: what was not finished is free for others at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        try:
            async with self._db.writing(alone=False) as uow:
                await uow.processes.remove(self.owner)
        except Exception as error:  # others find out by themselves
            _log.warning("the leases were not given back", error=type(error).__name__)

    async def require(self) -> None:
        """Before work begins: nobody may have given this process up. Raises Unavailable when somebody has, and
        DatabaseUnavailable."""
        if self.alone or self._clock.monotonic() - self._beaten_at < FRESH * self.lease_s:
            return
        if not await self._beat():
            raise Unavailable("This server was out of touch with the others: try again.", code="lease_lost")

    async def _run(self) -> None:
        while True:
            try:
                await self._beat()
                await self._watch()
                for listener in self.each_beat:
                    await listener()
            except DatabaseUnavailable:
                self._watched.clear()  # nobody can give signs of life now
            except Exception as error:
                _log.error("leases were not looked after", exc_info=error)
            await asyncio.sleep(self.lease_s / BEATS)

    async def _beat(self) -> bool:
        """False: this process had been given up, and lives anew."""
        began = self._clock.monotonic()
        owner = self.owner
        async with self._db.writing(alone=False) as uow:
            lives = await uow.processes.beat(owner)
        if lives:
            self._beaten_at = began
            return True
        if owner == self.owner:
            _log.error("others have given this process up: what it did is theirs", process=owner)
            self.owner = _new_owner()
            await self.register()
            for listener in self.lost:
                await listener()
        return False

    async def _watch(self) -> None:
        async with self._db.reading() as uow:
            beats = await uow.processes.beats()
        now = self._seconds_watched()
        seen = {id: self._watched.get(id, (beat, now)) for id, beat in beats.items() if id != self.owner}
        self._watched = {id: was if was[0] == beats[id] else (beats[id], now) for id, was in seen.items()}
        for id, (beat, since) in self._watched.items():
            if now - since >= self.lease_s:
                await self._give_up(id, beat)

    def _seconds_watched(self) -> float:
        now = self._clock.monotonic()
        self._watched_s += min(now - self._looked_at, MOST_OF_A_LOOK * self.lease_s)
        self._looked_at = now
        return self._watched_s

    async def _give_up(self, process_id: str, beat: int) -> None:
        async with self._db.writing() as uow:
            gone = await uow.processes.remove(process_id, beat=beat)
        if gone:
            _log.warning("a process gave no sign of life: its work is taken over", process=process_id)


def _new_owner() -> str:
    return f"api_{secrets.token_hex(10)}"
