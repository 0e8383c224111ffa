"""The events of all runs that an API process follows, read from Redis over one connection."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from service.engine.fleet import keys
from service.engine.fleet.link import Command, Link, LinkDown, refused
from service.engine.fleet.records import CLOSING, LOST, Batch, Event, decode_batch, ends

log = structlog.get_logger("fleet")

BLOCK_MS = 1000
PER_STREAM_S = 20e-6
LONGEST_PAUSE_S = 0.005
"""Reads are as far apart as that, with many streams: each takes a while, whether it brings one event or hundreds."""
RETRY_S = 0.1


class Follower:
    """Reads one run's events in order, each once, whatever was read twice."""

    def __init__(self) -> None:
        self._expected = 0
        self._events: list[Event] = []
        self._waiting: asyncio.Future[None] | None = None
        self.ended = False

    def feed(self, batch: Batch) -> None:
        """A batch as it was read. One that is missing before it ends the run: an answer with a hole is none."""
        if self.ended or 0 <= batch.first < self._expected:
            return
        hole = batch.first not in (CLOSING, self._expected)
        events: list[Event] = [LOST] if hole else batch.events
        self._expected += len(events)
        self._events += events
        self.ended = ends(events[-1])
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    @property
    def drained(self) -> bool:
        """Whether the last event was taken."""
        return self.ended and not self._events

    async def take(self) -> list[Event]:
        """The next events, at least one; nothing comes after the last."""
        while not self._events:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        events, self._events = self._events, []
        return events


@dataclass(slots=True)
class _Run:
    """`after`: the id of the last entry that was read. A read that began before a change of `joined` is void."""

    followers: list[Follower] = field(default_factory=list)
    after: bytes = b"0"
    joined: int = 0


class EventReader:
    """One blocking read of all streams at a time. `wake` must be called once a new run's stream may be written, by
    sending `wake_command` on another connection."""

    def __init__(self, link: Link, client_id: str) -> None:
        self._link = link
        self._wake_key = keys.wake(client_id)
        self._woken = b"0"
        self._runs: dict[bytes, _Run] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.down_since: float | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_reading())

    @property
    def wake_commands(self) -> list[Command]:
        """Interrupts the read, so that the next one has what was joined meanwhile."""
        return [("XADD", self._wake_key, "MAXLEN", "1", "*", "w", ""), ("EXPIRE", self._wake_key, 3600)]

    def join(self, run: str) -> Follower:
        """Follow a run from its first event."""
        entry = self._runs.setdefault(keys.events(run), _Run())
        entry.followers.append(follower := Follower())
        entry.after, entry.joined = b"0", entry.joined + 1
        self._changed.set()
        return follower

    def leave(self, run: str, follower: Follower) -> None:
        key = keys.events(run)
        if (entry := self._runs.get(key)) is not None:
            with suppress(ValueError):
                entry.followers.remove(follower)
            if not entry.followers:
                del self._runs[key]

    def lose(self, run: str) -> None:
        """End a run for its followers here, when Redis cannot be told."""
        if (entry := self._runs.get(keys.events(run))) is not None:
            for follower in entry.followers:
                follower.feed(Batch(CLOSING, [LOST]))

    async def connect_anew(self) -> None:
        """Another server is at the address: this connection must not stay with the one before."""
        self._read_anew()
        await self._link.close()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        await self._link.close()

    async def _keep_reading(self) -> None:
        while True:
            if not self._runs:
                self._changed.clear()
                await self._changed.wait()
            started = time.monotonic()
            try:
                await self._read()
                self.down_since = None
            except LinkDown:
                self.down_since = self.down_since or started
                self._read_anew()
                await asyncio.sleep(RETRY_S)
            except Exception as error:
                log.error("events could not be read", exc_info=error)
                await asyncio.sleep(RETRY_S)
            pause = min(PER_STREAM_S * len(self._runs), LONGEST_PAUSE_S) - (time.monotonic() - started)
            if pause > 0:
                await asyncio.sleep(pause)

    def _read_anew(self) -> None:
        """From the first entry on: their ids are times of one server, and the next may be another one, whose clock or
        whose copy is behind. Followers know what they had."""
        self._woken = b"0"
        for run in self._runs.values():
            run.after = b"0"

    async def _read(self) -> None:
        asked = [(key, run, run.joined) for key, run in self._runs.items() if not all(f.ended for f in run.followers)]
        names = [self._wake_key, *(key for key, _, _ in asked)]
        after = [self._woken, *(run.after for _, run, _ in asked)]
        command = ("XREAD", "COUNT", 1000, "BLOCK", BLOCK_MS, "STREAMS", *names, *after)
        replies = await self._link.ask(command, timeout_s=BLOCK_MS / 1e3 + 4)
        if (error := refused(replies)) is not None:
            raise LinkDown(str(error))
        found: list[Any] = replies[0] or []
        joined = {key: (run, n) for key, run, n in asked}
        for key, entries in found.items() if isinstance(found, dict) else found:
            if key == self._wake_key:
                self._woken = entries[-1][0]
            elif (known := joined.get(key)) is not None and known[0].joined == known[1]:
                _deliver(known[0], entries)


def _deliver(run: _Run, entries: list[Any]) -> None:
    run.after = entries[-1][0]
    for _, flat in entries:
        try:
            batch = decode_batch(flat[1])
        except msgspec.DecodeError as error:
            log.error("a batch of events cannot be read", error=str(error))
            batch = Batch(CLOSING, [LOST])
        for follower in run.followers:
            follower.feed(batch)
