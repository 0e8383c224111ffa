"""Keeps an engine process running: the `EngineClient` the service uses.

A crash ends what was open with `engine_lost`; the process is started again after a growing pause, unless
it never served and has failed several times in a row. One that says nothing any more is killed, which is a crash then.
Snapshots and journals are on disk: nothing is lost but the work in flight.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import structlog

from service.engine.factory import EngineConfig
from service.engine.messages import (
    AnswerEvent,
    AnswerRequest,
    BuildEvent,
    BuildRequest,
    DocumentRef,
    EngineInfo,
    EngineStats,
    Failed,
    ReleaseDone,
)
from service.engine.protocol import EngineLost
from service.engine.remote.child import EngineProcess
from service.engine.remote.client import LOST, RemoteEngine

log = structlog.get_logger("engine")

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0
LAST_EVENTS_S = 1.0
KILL_AFTER_S = 2.0
"""Time beyond the drain after which a process that does not end is killed."""
SILENT_S = 30.0
PINGS = 10
"""So many in a row, over the time allowed, are not answered by a process that is taken for dead: one look alone would
take it for dead when this process stood still itself."""


class EngineSupervisor:
    """An `EngineClient` over a child process.

    `start` waits for the first one. A process that lived shorter than `quick_s` failed quickly; after
    `max_quick_failures` of them in a row before one ever served, or when it refuses its configuration before that, it
    is not started again and `failure` says why. One that served can do so again, when memory is free for example:
    giving it up would leave a server that needs a person. `start_timeout_s` bounds loading the model. A process that
    has not said a word for `silent_s`, though it was asked to, is killed; 0 waits for ever.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        start_timeout_s: float = 600.0,
        quick_s: float = 30.0,
        max_quick_failures: int = 5,
        silent_s: float = SILENT_S,
    ) -> None:
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._quick_s = quick_s
        self._max_quick_failures = max_quick_failures
        self._silent_s = silent_s
        self._engine: RemoteEngine | None = None
        self._process: EngineProcess | None = None
        self._info: EngineInfo | None = None
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self.failure: str | None = None
        self.n_restarts = 0

    async def start(self) -> None:
        """Start the process and wait until it serves. Raises EngineLost when it will not."""
        self._keeper = asyncio.create_task(self._keep())
        if not await self.wait_alive(self._start_timeout_s):
            await self.close()
            raise EngineLost(self.failure or "the engine did not start in time")

    async def wait_alive(self, timeout_s: float) -> bool:
        """Wait until an engine serves; False when that takes too long or has been given up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.alive and self.failure is None:
                    self._changed.clear()
                    await self._changed.wait()
        return self.alive

    @property
    def info(self) -> EngineInfo:
        """Of the last process that served. Raises EngineLost before there was one."""
        if self._info is None:
            raise EngineLost("the engine has not started")
        return self._info

    @property
    def alive(self) -> bool:
        return self._engine is not None and self._engine.alive

    def build(self, request: BuildRequest) -> AsyncIterator[BuildEvent]:
        return self._engine.build(request) if self._engine is not None else _lost()

    def answer(self, request: AnswerRequest) -> AsyncIterator[AnswerEvent]:
        return self._engine.answer(request) if self._engine is not None else _lost()

    async def cancel(self, request_id: str) -> None:
        if self._engine is not None:
            await self._engine.cancel(request_id)

    async def release(self, document: DocumentRef) -> ReleaseDone:
        """An engine that is not there holds nothing."""
        try:
            return await self._current().release(document)
        except EngineLost:
            return ReleaseDone(0, 0)

    async def release_session(self, session_id: str) -> None:
        with suppress(EngineLost):
            await self._current().release_session(session_id)

    async def stats(self) -> EngineStats:
        return await self._current().stats()

    async def check(self) -> float:
        return await self._current().check()

    async def close(self) -> None:
        """Let the process drain (`drain_s` of the configuration) and end it; open iterators end before it."""
        self._closing.set()
        if self._process is not None:
            await self._process.stop(self._config.drain_s + KILL_AFTER_S)
        if self._keeper is not None:
            await self._keeper

    def _current(self) -> RemoteEngine:
        if self._engine is None:
            raise EngineLost(self.failure or LOST.detail)
        return self._engine

    async def _keep(self) -> None:
        pause, n_quick = FIRST_PAUSE_S, 0
        while not self._closing.is_set():
            started = time.monotonic()
            why = await self._run_once()
            if self._closing.is_set():
                return
            n_quick = n_quick + 1 if time.monotonic() - started < self._quick_s else 0
            refused = self._process is not None and self._process.refused_configuration
            if self._info is None and (refused or n_quick >= self._max_quick_failures):
                self._give_up(why)
                return
            pause = min(FIRST_PAUSE_S * 2 ** min(n_quick, 16), LONGEST_PAUSE_S)
            log.warning("engine restarts", reason=why, pause_s=pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause)
            self.n_restarts += 1

    async def _run_once(self) -> str:
        """One life of the process; how it ended."""
        process = self._process = await EngineProcess.start(self._config)
        try:
            if self._closing.is_set():
                return "the engine is closing"
            self._engine = await process.connect(self._start_timeout_s)
            self._info = self._engine.info
            self._changed.set()
            log.info("engine ready", pid=process.pid, model=self._info.model_name)
            return await self._ended(process, self._engine)
        except EngineLost as error:
            return str(error)
        finally:
            if self._engine is not None:
                await self._engine.drained(LAST_EVENTS_S)
                await self._engine.close()
                self._engine = None
            await process.stop(0)

    async def _ended(self, process: EngineProcess, engine: RemoteEngine) -> str:
        """Wait until the process has ended, and why it did; one that is silent for too long is killed."""
        ended, silent = asyncio.create_task(process.wait()), asyncio.create_task(_silent(engine, self._silent_s))
        try:
            await asyncio.wait((ended, silent), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return f"the engine ended with status {ended.result()}"
            log.error("engine does not answer", pid=process.pid, silent_s=self._silent_s)
            process.kill()
            await ended
            return f"the engine said nothing for {self._silent_s:g} s"
        finally:
            ended.cancel()
            silent.cancel()

    def _give_up(self, why: str) -> None:
        self.failure = why
        log.error("engine given up", reason=why)
        self._changed.set()


async def _silent(engine: RemoteEngine, after_s: float) -> None:
    """Return when an engine has said nothing for `after_s`; never for 0."""
    if not after_s:
        await asyncio.get_running_loop().create_future()
    heard, n_unanswered = -1, 0
    while n_unanswered < PINGS:
        engine.ping()
        await asyncio.sleep(after_s / PINGS)
        n_unanswered = n_unanswered + 1 if engine.n_heard == heard else 0
        heard = engine.n_heard


async def _lost() -> AsyncIterator[Failed]:
    yield LOST
