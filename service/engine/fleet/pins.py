"""Which documents a worker's own disk must not evict: API processes write it to Redis, workers look there."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress

import structlog

from service.engine.fleet import keys
from service.engine.fleet.link import Command, Link, LinkDown, refused
from service.engine.messages import DocumentRef

log = structlog.get_logger("fleet")

PinOnly = Callable[[Collection[tuple[str, str]]], None]
"""Keeps these documents on a disk, pairs of owner and id, and no others. Blocking."""


class Pins:
    """On a worker's side."""

    def __init__(self, link: Link, pin_only: PinOnly) -> None:
        self._link = link
        self._pin_only = pin_only

    async def follow(self) -> None:
        """Pin what is pinned now. Where Redis has forgotten what that is, all stays as it was."""
        with suppress(LinkDown):
            members = await _members(self._link)
            if keys.PINS_KNOWN not in members:
                return
            pairs = {_pair(member) for member in members - {keys.PINS_KNOWN}}
            try:
                await asyncio.to_thread(self._pin_only, pairs)
            except Exception as error:
                log.error("documents could not be pinned", exc_info=error)


async def tell_pinned(link: Link, read: Callable[[], Awaitable[Sequence[DocumentRef]]]) -> bool:
    """Have Redis know what is pinned; whether it did not before. Raises LinkDown, and what `read` raises.

    What Redis knows is looked at first: what others add meanwhile is in the rows that `read` reads."""
    known = await _members(link)
    wanted = {keys.PINS_KNOWN, *map(keys.member, await read())}
    commands: list[Command] = []
    if missing := wanted - known:
        commands.append(("SADD", keys.PINNED, *sorted(missing)))
    if over := known - wanted:
        commands.append(("SREM", keys.PINNED, *sorted(over)))
    if commands and (error := refused(await link.ask(*commands))) is not None:
        raise LinkDown(str(error))
    return bool(commands)


async def _members(link: Link) -> set[bytes]:
    replies = await link.ask(("SMEMBERS", keys.PINNED))
    if (error := refused(replies)) is not None:
        raise LinkDown(str(error))
    return set(replies[0])


def _pair(member: bytes) -> tuple[str, str]:
    """The inverse of `keys.member`."""
    owner_id, _, document_id = member.decode().partition("/")
    return owner_id, document_id
