"""Deletions on a worker's own disk: those it is told of, and those that it missed while it was away."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from service.engine.fleet import keys
from service.engine.fleet.link import Link, LinkDown, refused
from service.engine.fleet.records import Delete, decode_delete, fields
from service.engine.messages import ReleaseDone

log = structlog.get_logger("fleet")

AT_ONCE = 100
DeleteOne = Callable[[str, str, str], dict[str, tuple[int, int]]]
"""Removes a snapshot of an owner, by kind and id; objects and bytes by tier. Blocking."""


class Removals:
    """`path` keeps how far the list of deletions was followed; without it none that was missed is caught up with."""

    def __init__(self, link: Link, delete: DeleteOne, path: Path | None) -> None:
        self._link = link
        self._delete = delete
        self._path = path
        self._done: set[str] = set()

    async def remove(self, message: Delete) -> ReleaseDone:
        """From this worker's disk. Raises what the disk raises; then it is tried again by `catch_up`."""
        objects = nbytes = 0
        for kind, id in message.snapshots:
            removed = await asyncio.to_thread(self._delete, message.owner_id, kind, id)
            n, size = removed.get("disk", (0, 0))
            objects, nbytes = objects + n, nbytes + size
        if message.noted and self._path is not None:
            self._done.add(message.noted)
        return ReleaseDone(objects, nbytes)

    async def catch_up(self) -> None:
        """Do what was noted since this disk last followed; a disk that is new here has nothing to remove. What a full
        disk does not let it note is looked at again the next time: a deletion can be done twice."""
        if self._path is None:
            return
        try:
            after = await self._begin(self._path)
            while found := await self._noted_after(after):
                for entry in found:
                    after = entry[0].decode()
                    await self._follow(after, fields(entry)[b"d"])
                await asyncio.to_thread(_note, self._path, after)
        except LinkDown:
            return
        except OSError as error:
            log.warning("how far deletions were followed could not be noted", reason=str(error))

    async def _begin(self, path: Path) -> str:
        if path.exists():
            return path.read_text().strip() or "0"
        last = await self._ask("XREVRANGE", keys.DELETED, "+", "-", "COUNT", 1)
        after = last[0][0].decode() if last else "0"
        _note(path, after)
        return after

    async def _noted_after(self, after: str) -> list[Any]:
        return await self._ask("XRANGE", keys.DELETED, f"({after}", "+", "COUNT", AT_ONCE)

    async def _follow(self, noted: str, raw: bytes) -> None:
        if noted in self._done:
            self._done.discard(noted)
            return
        try:
            done = await self.remove(decode_delete(raw))
        except Exception as error:
            log.error("a deletion that was missed could not be done", exc_info=error)
            return
        if done.objects:
            log.info("a deletion that was missed is done", objects=done.objects, nbytes=done.nbytes)

    async def _ask(self, *command: Any) -> Any:
        replies = await self._link.ask(command)
        if (error := refused(replies)) is not None:
            raise LinkDown(str(error))
        return replies[0]


def _note(path: Path, after: str) -> None:
    """A full disk must not leave it empty: then all that was ever deleted would be followed again."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(after)
    unfinished.rename(path)
