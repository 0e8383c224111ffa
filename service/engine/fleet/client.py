"""The engine of an API process whose engines are workers elsewhere."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from service.engine.fleet import keys
from service.engine.fleet.dispatch import Dispatcher, Place, Run
from service.engine.fleet.link import Link, LinkDown
from service.engine.fleet.pins import tell_pinned
from service.engine.fleet.reader import EventReader
from service.engine.fleet.records import (
    NO_WORKER,
    UNKNOWN,
    UNSENT_BUILD,
    Delete,
    FollowPins,
    Pointer,
    Refused,
    decode_pointer,
    encode,
    ends,
)
from service.engine.fleet.roster import Roster, Worker, place_answer, place_build
from service.engine.fleet.watch import Watch
from service.engine.messages import (
    AnswerEvent,
    AnswerRequest,
    BuildDone,
    BuildEvent,
    BuildRequest,
    DocumentRef,
    EngineInfo,
    EngineStats,
    Failed,
    ReleaseDone,
)
from service.engine.protocol import EngineLost
from service.engine.remote import wire

CALL_S = 15.0
TRIES = 4
"""Workers that a request is sent to, one after another, when they refuse it because they are about to stop."""


class FleetClient:
    """An `EngineClient` and `Attachable` over all workers that registered in a Redis.

    `start` waits until one is there. `heartbeat_s` is how often it looks at them. A request is sent to one worker and
    stays there; when that is lost it ends with `engine_lost`. `understands`: whether an engine can be given this
    process's tokens; another one's answers would be about something else.
    """

    def __init__(
        self, url: str, *, heartbeat_s: float = 1.0, understands: Callable[[EngineInfo], bool] = lambda info: True
    ) -> None:
        self._roster = Roster(understands)
        self._link = Link(url, timeout_s=max(3 * heartbeat_s, 1.0))
        self._reader = EventReader(Link(url), uuid.uuid4().hex)
        self._dispatcher = Dispatcher(self._link, self._reader, self._roster, heartbeat_s)
        self._watch = Watch(self._link, self._roster, heartbeat_s, self._looked, self._reader.connect_anew)
        self._heartbeat_s = heartbeat_s
        self._found = asyncio.Event()
        self._n_detached = 0

    async def start(self, timeout_s: float) -> None:
        """Wait until there is a worker, or there was one. Raises EngineLost when there never was in that time."""
        self._reader.start()
        self._watch.start()
        try:
            await asyncio.wait_for(self._found.wait(), timeout_s)
        except TimeoutError:
            others = sorted({worker.state.info.model_name for worker in self.workers})
            await self.close()
            only = f"; those that are there have another model or prompt ({', '.join(others)})" if others else ""
            raise EngineLost(
                f"no worker registered in {timeout_s:g} s that this server can use: start `preread worker` with its "
                f"PREREAD_MODEL{only}"
            ) from None

    @property
    def info(self) -> EngineInfo:
        """What all workers can do together. Raises EngineLost before there was one."""
        if self._roster.info is None:
            raise EngineLost(NO_WORKER.detail)
        return self._roster.info

    @property
    def alive(self) -> bool:
        return bool(self._roster.serving) and not self._watch.down

    @property
    def workers(self) -> list[Worker]:
        """Those that are known now, also of other fingerprints."""
        return self._roster.all

    def build(self, request: BuildRequest) -> AsyncIterator[BuildEvent]:
        run = Run(request.request_id, [request.document])
        return self._run(run, wire.Build(0, request), place_build, UNSENT_BUILD)

    def answer(self, request: AnswerRequest) -> AsyncIterator[AnswerEvent]:
        documents = [part.document for part in request.parts] or [request.document]
        run = Run(request.request_id, documents, request.session_id)
        return self._run(run, wire.Answer(0, request), place_answer, NO_WORKER)

    async def attach(self, request_id: str) -> AsyncIterator[AnswerEvent]:
        """As `Attachable.attach` says."""
        try:
            pointer = await self._pointer(request_id)
        except LinkDown:
            yield Failed("unknown_request", "Redis does not answer", retryable=True)
            return
        if pointer is None:
            yield UNKNOWN
            return
        run = Run(request_id, [], pointer=pointer)
        follower = await self._dispatcher.attach(run)
        try:
            while not follower.drained:
                for event in await follower.take():
                    yield event  # pyright: ignore[reportReturnType] - a run of an answer has no others
        finally:
            self._dispatcher.leave(run)

    @contextmanager
    def detached(self) -> Iterator[None]:
        """As `left_running` says."""
        self._n_detached += 1
        try:
            yield
        finally:
            self._n_detached -= 1

    async def cancel(self, request_id: str) -> None:
        """Stop a request wherever it runs, also one that another process began."""
        with suppress(LinkDown):
            if (pointer := self._dispatcher.pointer_of(request_id) or await self._pointer(request_id)) is not None:
                await self._dispatcher.tell(pointer, wire.Cancel(request_id, closed=False))

    async def release(self, document: DocumentRef) -> ReleaseDone:
        """Drop a document from the memory of every worker."""
        return await self._released(wire.Release(0, document))

    async def delete(self, owner_id: str, snapshots: Sequence[tuple[str, str]]) -> ReleaseDone:
        """As `OwnDisks.delete` says: from the disks of all workers."""
        message = Delete(owner_id, list(snapshots))
        with suppress(LinkDown):
            noted = ("XADD", keys.DELETED, "MAXLEN", "~", keys.MAX_DELETED, "*", "d", encode(message))
            homes = [keys.home(DocumentRef(owner_id, id)) for kind, id in snapshots if kind == "document"]
            replies = await self._link.ask(noted, *(("DEL", home) for home in homes))
            if isinstance(replies[0], bytes):
                message = Delete(owner_id, message.snapshots, replies[0].decode())
        return await self._released(message)

    async def pin_only(self, read: Callable[[], Awaitable[Sequence[DocumentRef]]]) -> None:
        """As `OwnDisks.pin_only` says: on the disks of all workers."""
        with suppress(LinkDown):
            if await tell_pinned(self._link, read):
                await self._ask_all(FollowPins())

    async def release_session(self, session_id: str) -> None:
        await self._ask_all(wire.ReleaseSession(0, session_id))

    async def stats(self) -> EngineStats:
        """Of all workers together, as they said with their last heartbeat."""
        stats = self._roster.stats() if self.alive else None
        if stats is None:
            raise EngineLost(NO_WORKER.detail)
        return stats

    async def check(self) -> float:
        """Have one worker decode a token; the milliseconds until its answer was here."""
        serving = self._roster.serving
        if not serving:
            raise EngineLost(NO_WORKER.detail)
        started = time.monotonic()
        reply = await self._dispatcher.call(min(serving, key=lambda w: w.load), wire.Check(0), CALL_S)
        if reply is None or reply.error is not None:
            raise EngineLost("the worker did not decode a token")
        return (time.monotonic() - started) * 1e3

    async def close(self) -> None:
        await self._watch.close()
        await self._dispatcher.close()
        await self._reader.close()
        await self._link.close()

    async def _run(
        self, run: Run, message: wire.Build | wire.Answer, place: Place, unsent: Failed
    ) -> AsyncGenerator[Any, None]:
        tried: frozenset[str] = frozenset()
        open_at_worker = False
        try:
            while len(tried) < TRIES and (follower := await self._dispatcher.send(run, message, place, tried)):
                open_at_worker, again = True, False
                while not again:
                    for event in await follower.take():
                        if again := isinstance(event, Refused) or self._elsewhere(run, event, tried):
                            break
                        open_at_worker = not ends(event)
                        if isinstance(event, BuildDone):
                            await self._dispatcher.settled(run)
                        yield event
                        if not open_at_worker:
                            return
                open_at_worker = False
                tried |= {self._dispatcher.leave(run)}
            yield unsent
        finally:
            if open_at_worker and not self._n_detached:
                self._dispatcher.abandon(run)
            self._dispatcher.leave(run)

    def _elsewhere(self, run: Run, event: Any, tried: frozenset[str]) -> bool:
        """Whether a failure is only this worker's: another one has the document on its disk, or may have room on it."""
        if not isinstance(event, Failed) or run.pointer is None:
            return False
        here, others = run.pointer.worker_id, {worker.id for worker in self._roster.serving}
        match event.code:
            case "snapshot_miss":
                return len(run.documents) == 1 and here not in run.homes and not others.isdisjoint(run.homes)
            case "storage":
                # Of an answer some text may be with its reader.
                return not run.session_id and bool(others - tried - {here}) and len(tried) + 1 < TRIES
            case _:
                return False

    async def _pointer(self, request_id: str) -> Pointer | None:
        (raw,) = await self._link.ask(("GET", keys.request(request_id)))
        return decode_pointer(raw) if isinstance(raw, bytes) else None

    async def _released(self, message: wire.Release | Delete) -> ReleaseDone:
        replies = await self._ask_all(message)
        done = [reply.released for reply in replies if reply.released is not None]
        return ReleaseDone(sum(each.objects for each in done), sum(each.nbytes for each in done))

    async def _ask_all(self, message: wire.Release | wire.ReleaseSession | Delete | FollowPins) -> list[wire.Reply]:
        calls = [self._dispatcher.call(worker, message, CALL_S) for worker in self._roster.all]
        return [reply for reply in await asyncio.gather(*calls) if reply is not None]

    def _looked(self) -> None:
        if self._roster.info is not None:
            self._found.set()
        self._dispatcher.end_lost()
