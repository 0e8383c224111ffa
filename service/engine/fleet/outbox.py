"""What a worker has to say, on its way to Redis: gathered for a moment, then written for all runs at once."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from service.engine.fleet import keys
from service.engine.fleet.link import Command, Link, LinkDown, refused
from service.engine.fleet.records import Batch, Event, encode, ends

log = structlog.get_logger("fleet")

PER_RUN_S = 50e-6
LONGEST_GATHER_S = 0.01
RETRY_S = 0.1


@dataclass(slots=True)
class _Out:
    """`first`: the number of the first event of `events`."""

    request_id: str
    first: int = 0
    events: list[Event] = field(default_factory=list)
    kept_until: float = 0.0
    ended: bool = False


class Outbox:
    """Writes are at least as far apart as gathering takes; the first event after a pause goes out at once. A write that
    failed is repeated as it was: a batch that comes twice is known by its number."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._outs: dict[str, _Out] = {}
        self._waiting: dict[str, _Out] = {}
        self._life = 0
        self._something = asyncio.Event()
        self._nothing = asyncio.Event()
        self._nothing.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_writing())

    def open(self, run: str, request_id: str) -> None:
        """Before a run's first event."""
        self._outs[run] = _Out(request_id)

    def put(self, run: str, event: Event) -> None:
        """The last event of a run is the last that is said of it."""
        if (out := self._outs.get(run)) is not None and not out.ended:
            out.events.append(event)
            out.ended = ends(event)
            self._waiting[run] = out
            self._something.set()
            self._nothing.clear()

    def forget(self) -> None:
        """Say nothing more of any run."""
        self._life += 1
        self._outs.clear()
        self._waiting.clear()

    async def connect_anew(self) -> None:
        """Another server may be at the address."""
        await self._link.close()

    async def flushed(self, timeout_s: float) -> None:
        """Wait until everything was written."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._nothing.wait(), timeout_s)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        await self._link.close()

    async def _keep_writing(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            began = time.monotonic()
            await self._write(self._take(began))
            if not self._waiting:
                self._nothing.set()
            gather = min(PER_RUN_S * len(self._outs), LONGEST_GATHER_S)
            await asyncio.sleep(max(gather - (time.monotonic() - began), 0))

    def _take(self, now: float) -> list[Command]:
        waiting, self._waiting = self._waiting, {}
        taken: list[Command] = []
        for run, out in waiting.items():
            batch = Batch(out.first, out.events)
            out.first, out.events = out.first + len(batch.events), []
            key = keys.events(run)
            taken.append(("XADD", key, "MAXLEN", "~", keys.MAX_EVENTS, "*", "e", encode(batch)))
            if out.ended:
                taken += [("EXPIRE", key, keys.KEPT_S), ("EXPIRE", keys.request(out.request_id), keys.KEPT_S)]
                self._outs.pop(run, None)
            elif now > out.kept_until:
                out.kept_until = now + keys.RUNNING_S / 4
                taken.append(("EXPIRE", key, keys.RUNNING_S))
        return taken

    async def _write(self, commands: list[Command]) -> None:
        """Until it is done, or everything is forgotten."""
        life = self._life
        while commands and life == self._life:
            try:
                if (error := refused(await self._link.ask(*commands))) is None:
                    return
                log.warning("Redis refuses events", reason=str(error))
            except LinkDown as error:
                log.warning("events cannot be written", reason=str(error))
            await asyncio.sleep(RETRY_S)
