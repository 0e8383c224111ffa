"""A worker's place among the workers: registered in Redis for one epoch, for as long as its heartbeat is in time."""

import asyncio
import time
import uuid
from collections.abc import Callable
from enum import Enum

import structlog

from service.engine.fleet import keys
from service.engine.fleet.link import Link, LinkDown, refused, server_of
from service.engine.fleet.records import WorkerState, encode

log = structlog.get_logger("fleet")

_BEAT = """
-- KEYS: worker, its work, all workers. ARGV: epoch, state, milliseconds to live, id.
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch and epoch ~= ARGV[1] then return 2 end
if not epoch or redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('SADD', KEYS[3], ARGV[4])
return 1
"""
_REGISTER = """
-- As above; and what the stream of work begins with.
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('XADD', KEYS[2], '1-0', 'r', '', 'm', '')
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'state', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('SADD', KEYS[3], ARGV[4])
return 1
"""
_LEAVE = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('SREM', KEYS[3], ARGV[4])
return 1
"""


class Beat(Enum):
    """What a heartbeat found."""

    IN_TIME = "in time"
    OVER = "over"
    """The registration ran out, or Redis lost it; or it is another Redis, which may lack what the one before had."""
    REPLACED = "replaced"
    """Another process registered under the same id since."""
    UNHEARD = "unheard"
    """Redis does not answer, or takes nothing."""


class Membership:
    """`state` gives what the worker says of itself in an epoch."""

    def __init__(self, link: Link, worker_id: str, heartbeat_s: float, state: Callable[[str], WorkerState]) -> None:
        self._link = link
        self._worker_id = worker_id
        self._live_ms = int(keys.BEATS * heartbeat_s * 1000)
        self._state = state
        self._heard_at = 0.0
        self._turn = asyncio.Lock()
        self._server = ""
        self._complained = ""
        self.epoch = ""
        """Empty: it is not registered."""

    @property
    def silent_s(self) -> float:
        """Since Redis was last told that the worker lives."""
        return time.monotonic() - self._heard_at

    @property
    def is_over(self) -> bool:
        """Whether others must take the worker for lost by now."""
        return self.silent_s * 1000 > self._live_ms

    async def register(self) -> bool:
        """Begin an epoch; False when Redis does not take it."""
        async with self._turn:
            epoch, began = uuid.uuid4().hex[:12], time.monotonic()
            found, server = await self._run(_REGISTER, epoch)
            if found != 1:
                return False
            self.epoch, self._heard_at, self._server = epoch, began, server
            log.info("worker registered", worker=self._worker_id, epoch=epoch)
            return True

    async def beat(self) -> Beat:
        """Say that the worker lives, and how it is."""
        async with self._turn:
            began = time.monotonic()
            found, server = await self._run(_BEAT, self.epoch)
            if found is not None and server != self._server:
                return Beat.OVER
            match found:
                case 1:
                    self._heard_at = began
                    return Beat.IN_TIME
                case 0:
                    return Beat.OVER
                case 2:
                    return Beat.REPLACED
                case _:
                    return Beat.UNHEARD

    async def leave(self) -> None:
        """Be gone at once, rather than when the heartbeat is missed."""
        if self.epoch:
            async with self._turn:
                await self._run(_LEAVE, self.epoch)
                self.epoch = ""

    async def _run(self, script: str, epoch: str) -> tuple[int | None, str]:
        """What a script says, None when it was not run; and which server ran it."""
        names = (keys.worker(self._worker_id), keys.work(self._worker_id, epoch), keys.WORKERS)
        arguments = (epoch, encode(self._state(epoch)), self._live_ms, self._worker_id)
        try:
            replies = await self._link.ask(("EVAL", script, 3, *names, *arguments), ("INFO", "server"))
        except LinkDown as error:
            self._complain("Redis does not answer", error)
            return None, ""
        if (error := refused(replies[:1])) is not None:
            self._complain("Redis refuses the heartbeat", error)
            return None, ""
        self._complained = ""
        return int(replies[0]), server_of(replies[1])

    def _complain(self, what: str, error: Exception) -> None:
        """Once until it is well again: with every heartbeat it would fill the log."""
        if what != self._complained:
            log.warning(what, reason=str(error))
        self._complained = what
