"""Serves one engine to all API processes that share a Redis."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from service.engine.fleet import keys
from service.engine.fleet.link import Link, LinkDown, refused
from service.engine.fleet.membership import Beat, Membership
from service.engine.fleet.outbox import Outbox
from service.engine.fleet.pins import PinOnly, Pins
from service.engine.fleet.records import Delete, FollowPins, Refused, WorkerState, decode_task, fields
from service.engine.fleet.removals import DeleteOne, Removals
from service.engine.messages import BuildDone, EngineStats, Failed
from service.engine.protocol import EngineClient, EngineLost
from service.engine.remote import wire

log = structlog.get_logger("fleet")

BLOCK_MS = 1000
RETRY_S = 0.1
RETRY_SHARE = 0.2
"""Of a heartbeat, until the next one when Redis did not hear it."""
FLUSH_S = 2.0
STUCK_S = 10.0
"""An engine that has given no figures for so long takes no more requests."""
CATCH_UP_BEATS = 10
"""Heartbeats between two looks at deletions and pins that were missed."""
STOPPING = Failed("engine_lost", "the worker stops: ask again", retryable=True)
_FIRST = b"1-0"
Call = wire.Release | wire.ReleaseSession | wire.Stats | wire.Check | Delete | FollowPins


class WorkerReplaced(EngineLost):
    """Another process serves under the id of this worker."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a worker is beside its engine. `shares`: it has tiers beyond its disk. `free_nbytes`: of its disk.
    `delete` removes from its disk; `deletions` is a file that keeps which it has done. `pin_only` keeps documents
    there."""

    worker_id: str
    heartbeat_s: float = 1.0
    shares: bool = False
    free_nbytes: Callable[[], int] = lambda: 0
    delete: DeleteOne = lambda owner_id, kind, id: {}
    deletions: Path | None = None
    pin_only: PinOnly = lambda documents: None


@dataclass(slots=True, eq=False)
class _Open:
    request_id: str
    task: asyncio.Task[None] | None = None


class FleetWorker:
    """`run` registers and serves until `stop`. The engine is given, and not closed."""

    def __init__(self, url: str, engine: EngineClient, place: Place) -> None:
        timeout_s = max(keys.BEATS * place.heartbeat_s / 2, 0.5)
        self._engine = engine
        self._place = place
        self._work = Link(url)
        self._link = Link(url, timeout_s=timeout_s)
        self._outbox = Outbox(Link(url))
        self._member = Membership(self._link, place.worker_id, place.heartbeat_s, self._state)
        self._pins = Pins(self._link, place.pin_only)
        self._removals = Removals(self._link, place.delete, place.deletions)
        self._open: dict[str, _Open] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._stats: EngineStats | None = None
        self._stats_at = time.monotonic()

    @property
    def n_open(self) -> int:
        return len(self._open)

    async def run(self, stop: asyncio.Event, grace_s: float) -> None:
        """Serve until `stop` is set. Then no more requests are taken, and those that are open may end for `grace_s`.

        Raises WorkerReplaced when another process has taken this one's place."""
        self._outbox.start()
        work = self._keep_beating(), self._keep_taking(), self._keep_counting(), self._keep_up()
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await _first_of(stop, tasks[0])
            await self._drain(grace_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._end_all()
            await self._member.leave()
            for link in (self._work, self._link):
                await link.close()
            await self._outbox.close()

    # Being there.

    async def _keep_beating(self) -> None:
        while True:
            heard = await self._beat() if self._member.epoch else await self._member.register()
            # One that was not heard is due: a connection that broke must not cost a whole heartbeat.
            await asyncio.sleep(self._place.heartbeat_s * (1 if heard else RETRY_SHARE))

    async def _beat(self) -> bool:
        """Whether Redis heard it."""
        beat = await self._member.beat()
        match beat:
            case Beat.OVER:
                log.warning("the heartbeat came too late, or Redis lost it: what is open is given up")
                self._member.epoch = ""
                await self._end_all()
                # It may be another Redis: then none of the connections may stay with the one before.
                await self._work.close()
                await self._outbox.connect_anew()
                await self._member.register()
            case Beat.REPLACED:
                raise WorkerReplaced(
                    f"Another process registered as worker {self._place.worker_id}. Is its data directory a copy of "
                    "this one? Then remove `worker.id` from the copy."
                )
            case Beat.UNHEARD if self._member.is_over:
                if self._open:
                    log.error("Redis does not hear this worker: what is open is given up", open=self.n_open)
                await self._end_all()
        return beat is not Beat.UNHEARD

    def _state(self, epoch: str) -> WorkerState:
        return WorkerState(
            self._place.worker_id,
            epoch,
            self._engine.info,
            ready=self._engine.alive and time.monotonic() - self._stats_at < max(STUCK_S, 3 * self._place.heartbeat_s),
            draining=self._draining,
            shares=self._place.shares,
            active=self.n_open,
            free_nbytes=self._place.free_nbytes(),
            heartbeat_s=self._place.heartbeat_s,
            stats=self._stats,
        )

    async def _keep_counting(self) -> None:
        while True:
            with suppress(EngineLost):
                self._stats = await self._engine.stats()
                self._stats_at = time.monotonic()
            await asyncio.sleep(self._place.heartbeat_s / 2)

    async def _keep_up(self) -> None:
        while True:
            await self._pins.follow()
            await self._removals.catch_up()
            await asyncio.sleep(CATCH_UP_BEATS * self._place.heartbeat_s)

    # Taking requests.

    async def _keep_taking(self) -> None:
        epoch, after = "", _FIRST
        while True:
            if epoch != self._member.epoch:
                epoch, after = self._member.epoch, _FIRST
            if not epoch:
                await asyncio.sleep(RETRY_S)
                continue
            try:
                after = await self._take(epoch, after)
            except LinkDown:
                await asyncio.sleep(RETRY_S)

    async def _take(self, epoch: str, after: bytes) -> bytes:
        """Read what has come, and begin it; the id of the last entry. What was read is removed: it may be large."""
        key = keys.work(self._place.worker_id, epoch)
        replies = await self._work.ask(
            ("XTRIM", key, "MINID", after),
            ("XREAD", "COUNT", 100, "BLOCK", BLOCK_MS, "STREAMS", key, after),
            timeout_s=BLOCK_MS / 1e3 + 4,
        )
        if (error := refused(replies)) is not None:
            raise LinkDown(str(error))
        found: Any = replies[1] or []
        for _, entries in found.items() if isinstance(found, dict) else found:
            for entry in entries:
                # A worker that was stopped for a while must not begin what others have been told is lost.
                if epoch == self._member.epoch and not self._member.is_over:
                    self._begin(fields(entry))
                after = entry[0]
        return after

    def _begin(self, task: dict[bytes, bytes]) -> None:
        run = task[b"r"].decode()
        try:
            message = decode_task(task[b"m"])
        except msgspec.DecodeError as error:
            log.error("a request cannot be read", run=run, error=str(error))
            self._say_once(run, Failed("internal", "the worker does not understand the request: is it of one version?"))
            return
        match message:
            case wire.Build() | wire.Answer():
                self._start(run, message)
            case wire.Cancel():
                self._cancel(run, message)
            case _:
                self._call(run, message)

    def _start(self, run: str, message: wire.Build | wire.Answer) -> None:
        if self._draining or not self._engine.alive:
            # An engine that is being started again is told to others with the next heartbeat only.
            reason = "draining" if self._draining else "the engine restarts"
            self._say_once(run, Refused(reason), message.request.request_id)
            return
        self._outbox.open(run, message.request.request_id)
        opened = self._open[run] = _Open(message.request.request_id)
        self._idle.clear()
        opened.task = asyncio.create_task(self._relay(run, self._events(run, message)))

    def _events(self, run: str, message: wire.Build | wire.Answer) -> AsyncIterator[Any]:
        """The engine knows a request by its run: two API processes may have begun the same one."""
        if isinstance(message, wire.Build):
            return self._engine.build(msgspec.structs.replace(message.request, request_id=run))
        return self._engine.answer(msgspec.structs.replace(message.request, request_id=run))

    async def _relay(self, run: str, events: AsyncIterator[Any]) -> None:
        try:
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    self._outbox.put(run, event)
                    if isinstance(event, BuildDone) and not event.already:
                        read = {"prefilled": event.prefilled_tokens, "resumed": event.resumed_tokens}
                        log.info("document read", run=run, seconds=round(event.seconds, 3), **read)
        except Exception as error:
            log.error("a request failed", run=run, exc_info=error)
            self._outbox.put(run, Failed("internal", f"{type(error).__name__}: {error}"))
        finally:
            self._open.pop(run, None)
            if not self._open:
                self._idle.set()

    def _cancel(self, run: str, message: wire.Cancel) -> None:
        opened = self._open.get(run)
        if opened is None or opened.task is None:
            return
        if message.closed:
            self._drop(run, opened, Failed("cancelled", "nobody read the events any more"))
        else:
            self._keep(asyncio.create_task(self._engine.cancel(run)))

    def _drop(self, run: str, opened: _Open, last: Failed) -> None:
        """End a request without its engine's last word."""
        self._outbox.put(run, last)
        if opened.task is not None:
            opened.task.cancel()

    def _say_once(self, run: str, event: Any, request_id: str = "") -> None:
        self._outbox.open(run, request_id or run)
        self._outbox.put(run, event)

    def _call(self, run: str, message: Call) -> None:
        async def reply() -> None:
            try:
                answer = await self._reply(message)
            except Exception as error:
                if not isinstance(error, EngineLost):
                    log.error("a call failed", run=run, exc_info=error)
                answer = wire.Reply(0, error=str(error) or type(error).__name__)
            self._say_once(run, answer)

        self._keep(asyncio.create_task(reply()))

    async def _reply(self, message: Call) -> wire.Reply:
        match message:
            case wire.Release():
                return wire.Reply(0, released=await self._engine.release(message.document))
            case wire.ReleaseSession():
                await self._engine.release_session(message.session_id)
                return wire.Reply(0)
            case wire.Stats():
                return wire.Reply(0, stats=await self._engine.stats())
            case Delete():
                return wire.Reply(0, released=await self._removals.remove(message))
            case FollowPins():
                await self._pins.follow()
                return wire.Reply(0)
            case wire.Check():
                return wire.Reply(0, milliseconds=await self._engine.check())

    # Ending.

    async def _drain(self, grace_s: float) -> None:
        self._draining = True
        log.info("worker drains", open=self.n_open, grace_s=grace_s)
        await self._member.beat()
        if self._open:
            self._idle.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), grace_s)
        for run, opened in list(self._open.items()):
            self._drop(run, opened, STOPPING)
        await self._outbox.flushed(FLUSH_S)

    async def _end_all(self) -> None:
        """Give up every request; nothing more is said of it."""
        self._outbox.forget()
        tasks = [opened.task for opened in self._open.values() if opened.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


async def _first_of(stop: asyncio.Event, beating: asyncio.Task[None]) -> None:
    """Wait until `stop` is set. Raises why the heart stopped before."""
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((stopped, beating), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
    if beating.done():
        beating.result()
