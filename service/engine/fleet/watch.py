"""Keeps an API process's roster: asks Redis for the workers' states with every heartbeat."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog

from service.engine.fleet import keys
from service.engine.fleet.link import Command, Link, LinkDown, refused, server_of
from service.engine.fleet.records import WorkerState, decode_info, decode_state, encode
from service.engine.fleet.roster import Roster
from service.engine.messages import EngineInfo

log = structlog.get_logger("fleet")

RETRY_SHARE = 0.2
"""Of a heartbeat, until the next look when one failed."""


class Watch:
    """`on_change` is called after every look, also one that failed; `on_server` when another Redis took over."""

    def __init__(
        self,
        link: Link,
        roster: Roster,
        heartbeat_s: float,
        on_change: Callable[[], Any],
        on_server: Callable[[], Awaitable[None]],
    ) -> None:
        self._link = link
        self._roster = roster
        self._heartbeat_s = heartbeat_s
        self._on_change = on_change
        self._on_server = on_server
        self._server = ""
        self._known: dict[str, tuple[str, str]] = {}
        self._told: EngineInfo | None = None
        self._task: asyncio.Task[None] | None = None
        self.down = False
        """Whether the last look failed."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def look(self) -> None:
        """Read the states of all workers. Raises LinkDown."""
        began = time.monotonic()
        members, said, about = await self._ask(
            ("SMEMBERS", keys.WORKERS), ("GET", keys.INFO), ("INFO", "server"), optional=1
        )
        before, self._server = self._server, server_of(about)
        if before not in ("", self._server):
            await self._on_server()
        served = _info_of(said)
        if said is None:  # Redis lost it, or is another one
            self._told = None
        ids = sorted(member.decode() for member in members)
        states = await self._ask(*(("HGET", keys.worker(each), "state") for each in ids)) if ids else []
        found = {id: state for id, raw in zip(ids, states, strict=True) if raw and (state := _state_of(raw))}
        if gone := [id for id, raw in zip(ids, states, strict=True) if raw is None]:
            await self._ask(("SREM", keys.WORKERS, *gone))
        if self._roster.update(found.values(), began, served.fingerprint_digest if served is not None else ""):
            log.warning("another fingerprint is served now: more workers have it", fingerprint=self._roster.fingerprint)
        self._tell(found)

    async def remember(self) -> None:
        """Know what the workers were before, when there is none now; let others know what they are. Raises LinkDown."""
        if self._roster.serving and self._roster.info not in (None, self._told):
            await self._ask(("SET", keys.INFO, encode(self._roster.info)))
            self._told = self._roster.info
        elif self._roster.info is None:
            (raw,) = await self._ask(("GET", keys.INFO))
            info = _info_of(raw)
            self._roster.info = info if info is not None and self._roster.understands(info) else None

    async def _keep_looking(self) -> None:
        while True:
            try:
                await self.look()
                await self.remember()
                self.down = False
            except LinkDown as error:
                if not self.down:  # with every look it would fill the log
                    log.warning("Redis cannot be asked for workers", reason=str(error))
                self.down = True
            except Exception as error:
                log.error("the workers could not be read", exc_info=error)
            self._on_change()
            await asyncio.sleep(self._heartbeat_s * (RETRY_SHARE if self.down else 1))

    async def _ask(self, *commands: Command, optional: int = 0) -> list[Any]:
        """Of the last `optional` commands a refusal is a reply."""
        replies = await self._link.ask(*commands)
        if (error := refused(replies[: len(replies) - optional])) is not None:
            raise LinkDown(str(error))
        return replies

    def _tell(self, found: dict[str, WorkerState]) -> None:
        """Log workers that came, went, or cannot be used because of their model."""
        now = {id: (state.epoch, state.info.fingerprint_digest) for id, state in found.items()}
        for id in self._known.keys() - now.keys():
            log.warning("worker gone", worker=id)
        for id, (epoch, fingerprint) in now.items():
            if self._known.get(id) != (epoch, fingerprint):
                used = fingerprint == self._roster.fingerprint
                of = {"fingerprint": fingerprint[:12], "model": found[id].info.model_name}
                log.info("worker found", worker=id, epoch=epoch, used=used, **of)
        self._known = now


def _state_of(raw: bytes) -> WorkerState | None:
    try:
        return decode_state(raw)
    except msgspec.DecodeError as error:
        log.warning("a worker of another version is left alone", error=str(error))
        return None


def _info_of(raw: bytes | None) -> EngineInfo | None:
    try:
        return decode_info(raw) if raw else None
    except msgspec.DecodeError:  # of another version: the next one who serves writes it anew
        return None
