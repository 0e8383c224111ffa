"""Sends requests to workers, and keeps which of them runs what, so that none waits for a worker that is lost."""

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog

from service.engine.fleet import keys
from service.engine.fleet.link import Command, Link, LinkDown, refused
from service.engine.fleet.reader import EventReader, Follower
from service.engine.fleet.records import CLOSING, LOST, Batch, Pointer, encode
from service.engine.fleet.roster import Roster, Wish, Worker
from service.engine.messages import DocumentRef
from service.engine.remote import wire

log = structlog.get_logger("fleet")

REQUEST_S = 24 * 3600


@dataclass(slots=True, eq=False)
class Run:
    """A request on its way through a worker. `homes` and `stuck`: what Redis knew of its documents and its session."""

    request_id: str
    documents: list[DocumentRef]
    session_id: str = ""
    pointer: Pointer | None = None
    homes: tuple[str, ...] = ()
    stuck: str = ""
    follower: Follower | None = None
    joined_at: float = 0.0

    def wish(self, tried: frozenset[str]) -> Wish:
        return Wish(self.documents, self.stuck, self.homes, tried)


Place = Callable[[list[Worker], Wish], Worker | None]
"""Chooses a worker for a wish; None when there is none to choose."""


class Dispatcher:
    """All runs that this process follows."""

    def __init__(self, link: Link, reader: EventReader, roster: Roster, heartbeat_s: float) -> None:
        self._link = link
        self._reader = reader
        self._roster = roster
        self._lost_after_s = keys.BEATS * heartbeat_s
        self._runs: set[Run] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def pointer_of(self, request_id: str) -> Pointer | None:
        """Where a request runs, if this process follows it."""
        return next((run.pointer for run in self._runs if run.request_id == request_id), None)

    async def send(
        self, run: Run, message: wire.Build | wire.Answer, place: Place, tried: frozenset[str]
    ) -> Follower | None:
        """Send a request to the worker that `place` chooses, to another one if that is gone; its events. None: there is
        no worker, or Redis does not answer."""
        try:
            await self._look_up(run)
            while (worker := place(self._roster.serving, run.wish(tried))) is not None:
                run.pointer = Pointer(f"{run.request_id}:{uuid.uuid4().hex[:8]}", *worker.life)
                follower = self._join(run)
                if await self._send(run, message):
                    return follower
                tried |= {self.leave(run)}
        except LinkDown as error:
            self.abandon(run)
            log.warning("a request could not be sent", request_id=run.request_id, reason=str(error))
        return None

    async def attach(self, run: Run) -> Follower:
        """Follow a run that another process may have begun; it must be left."""
        follower = self._join(run)
        with suppress(LinkDown):
            await self._link.ask(*self._reader.wake_commands)
        return follower

    def leave(self, run: Run) -> str:
        """Follow a run no more; the id of its worker."""
        self._runs.discard(run)
        if run.pointer is None:
            return ""
        if run.follower is not None:
            self._reader.leave(run.pointer.run, run.follower)
            self._roster.follow(run.pointer.life, -1)
            run.follower = None
        return run.pointer.worker_id

    def abandon(self, run: Run) -> None:
        """Nobody reads a run any more: let its worker drop it. Returns at once."""
        if run.pointer is not None:
            self._later(self.tell(run.pointer, wire.Cancel(run.request_id, closed=True)))

    async def tell(self, pointer: Pointer, message: wire.Cancel) -> None:
        """Send a message about a run to its worker, if that lives. Raises LinkDown."""
        work = keys.work(pointer.worker_id, pointer.epoch)
        await self._link.ask(_task(work, pointer.run, message))

    async def call(self, worker: Worker, message: Any, timeout_s: float) -> wire.Reply | None:
        """Ask a worker for its one reply; None when it is lost, or too slow."""
        run = Run(f"call:{uuid.uuid4().hex}", [])
        run.pointer = Pointer(run.request_id, *worker.life)
        try:
            async with asyncio.timeout(timeout_s):
                follower = self._join(run)
                work = keys.work(*worker.life)
                replies = await self._link.ask(_task(work, run.pointer.run, message), *self._reader.wake_commands)
                if replies[0] is None:
                    return None
                event = (await follower.take())[0]
                return event if isinstance(event, wire.Reply) else None
        except (LinkDown, TimeoutError):
            return None
        finally:
            self.leave(run)

    async def settled(self, run: Run) -> None:
        """Note that a document is on the disk of the worker that built it."""
        if run.pointer is not None:
            with suppress(LinkDown):
                await self._link.ask(*_at_home(run.documents[0], run.pointer.worker_id))

    def end_lost(self) -> None:
        """End the runs of workers that are gone; of all of them when nothing was heard for too long."""
        now = time.monotonic()
        silent_s = now - self._roster.seen_at
        if silent_s <= self._lost_after_s:
            # A run that was joined while the workers were looked at may be one of a worker that came meanwhile.
            gone = [run for run in self._runs if run.joined_at < self._roster.seen_at and self._is_lost(run)]
            if gone:
                self._later(self._end(gone))
            return
        if self._roster.all:
            log.error("Redis did not answer: what is open is given up", silent_s=round(silent_s, 1))
            self._roster.update((), self._roster.seen_at)
        for run in self._runs:
            self._lose(run)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _look_up(self, run: Run) -> None:
        """What Redis knows of the run's session and its first document."""
        if not run.documents or len(self._roster.serving) < 2:
            return
        stuck, homes = await self._link.ask(
            ("GET", keys.session(run.session_id)), ("ZREVRANGE", keys.home(run.documents[0]), 0, 7)
        )
        run.stuck = stuck.decode() if isinstance(stuck, bytes) else ""
        run.homes = tuple(home.decode() for home in homes) if isinstance(homes, list) else ()

    async def _send(self, run: Run, message: wire.Build | wire.Answer) -> bool:
        """False: the worker is not there any more. Raises LinkDown, also when Redis is full."""
        pointer = run.pointer
        assert pointer is not None
        commands: list[Command] = [
            ("SET", keys.request(run.request_id), encode(pointer), "EX", REQUEST_S),
            _task(keys.work(pointer.worker_id, pointer.epoch), pointer.run, message),
            *self._reader.wake_commands,
        ]
        if run.session_id:
            commands.append(("SET", keys.session(run.session_id), pointer.worker_id, "EX", keys.SESSION_S))
        if isinstance(message, wire.Build):
            commands += _at_home(run.documents[0], pointer.worker_id)
        replies = await self._link.ask(*commands)
        if (error := refused(replies)) is not None:
            raise LinkDown(str(error))
        return replies[1] is not None

    def _join(self, run: Run) -> Follower:
        assert run.pointer is not None
        run.follower, run.joined_at = self._reader.join(run.pointer.run), time.monotonic()
        self._roster.follow(run.pointer.life, 1)
        self._runs.add(run)
        return run.follower

    def _is_lost(self, run: Run) -> bool:
        return run.pointer is not None and not self._roster.lives(run.pointer.worker_id, run.pointer.epoch)

    def _lose(self, run: Run) -> None:
        if run.pointer is not None:
            self._reader.lose(run.pointer.run)

    async def _end(self, runs: list[Run]) -> None:
        """Close the streams of lost runs. What is first in a stream counts, for all who read it."""
        closing = encode(Batch(CLOSING, [LOST]))
        commands: list[Command] = []
        for run in runs:
            if run.pointer is not None:
                key = keys.events(run.pointer.run)
                commands += [("XADD", key, "*", "e", closing), ("EXPIRE", key, keys.KEPT_S)]
        try:
            failed = refused(await self._link.ask(*commands)) is not None
        except LinkDown:
            failed = True
        for run in runs if failed else ():
            self._lose(run)

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _task(work: bytes, run: str, message: Any) -> Command:
    """Append to a worker's stream, if it is there."""
    return ("XADD", work, "NOMKSTREAM", "*", "r", run, "m", encode(message))


def _at_home(document: DocumentRef, worker_id: str) -> list[Command]:
    key = keys.home(document)
    return [("ZADD", key, int(time.time()), worker_id), ("EXPIRE", key, keys.HOME_S)]


async def _quietly(work: Any) -> None:
    with suppress(LinkDown):
        await work
