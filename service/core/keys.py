"""API keys: who is asking, and what the key is for."""

import asyncio
import hmac
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import structlog

from service.core.access import ASK, READ
from service.core.background import Background
from service.core.clock import Clock
from service.core.credentials import digest_of, is_key, matches, split
from service.db.engine import Database
from service.db.people import LOCAL, KeyRow, ShareRow
from service.errors import DatabaseUnavailable, Invalid, Unauthenticated
from service.paths import expanded
from service.settings import Settings

MANAGE, METRICS = "manage", "metrics"
SCOPES = (READ, ASK, MANAGE, METRICS)
_INCLUDED = {READ: {READ}, ASK: {READ, ASK}, MANAGE: {READ, ASK, MANAGE}, METRICS: {METRICS}}
ADMIN_VARIABLE, ADMIN_FILE_VARIABLE = "PREREAD_ADMIN_KEY", "PREREAD_ADMIN_KEY_FILE"
_FLUSH_S = 30.0
_LOOK_AGAIN_S = 1.0
_REFUSED = "The key is not valid: it is unknown, was revoked, or its time is over."
_log = structlog.get_logger("preread.keys")


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. `user_id` is the owner of what is made: a user's id, or a link's. `key_id` is None on a server without
    keys. `account` is whose limits count."""

    user_id: str
    key_id: str | None
    scopes: frozenset[str]
    account: str

    @property
    def is_link(self) -> bool:
        """Whether anybody may have the token."""
        return self.key_id == self.user_id


LOCAL_PRINCIPAL = Principal(LOCAL, None, frozenset(SCOPES), LOCAL)


class Keys(Background):
    """Knows who a token is. A server for which no key was ever made knows everybody as its local user; from the first
    key on, every request needs one."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        self._required = False
        self._looked_at = -_LOOK_AGAIN_S
        self._used: dict[str, float] = {}

    async def required(self) -> bool:
        """Whether requests need a key. Raises DatabaseUnavailable."""
        if not self._required and time.monotonic() - self._looked_at >= _LOOK_AGAIN_S:
            self._required = await self.is_any()
            self._looked_at = time.monotonic()
        return self._required

    async def is_any(self) -> bool:
        """Whether a key was ever made. Raises DatabaseUnavailable."""
        async with self._db.reading() as uow:
            return await uow.people.is_any_key()

    def look_again(self) -> None:
        """A key was made in this process."""
        self._looked_at = -_LOOK_AGAIN_S

    async def principal(self, token: str | None) -> Principal:
        """Raises Unauthenticated, DatabaseUnavailable."""
        if not await self.required():
            return LOCAL_PRINCIPAL
        if token is None:
            raise Unauthenticated("This needs an API key: send the header `Authorization: Bearer KEY`.")
        if (parts := split(token)) is None:
            raise Unauthenticated(_REFUSED, code="invalid_key")
        return await (self._by_key(*parts) if is_key(parts[0]) else self._by_link(*parts))

    async def holder(self, id: str) -> Principal:
        """Of a key, or a link, whose token was known before. Raises Unauthenticated when it is not valid any more,
        DatabaseUnavailable."""
        async with self._db.reading() as uow:
            key = await uow.people.key(id) if is_key(id) else None
            link = None if is_key(id) else await uow.shares.get(id)
        if key is not None and key.revoked_at is None and self._lasts(key.expires_at):
            return self._holder_of_key(key)
        if link is not None and self._lasts(link.expires_at):
            return _holder_of_link(link)
        raise Unauthenticated(_REFUSED, code="invalid_key")

    async def is_valid(self, principal: Principal) -> bool:
        """Whether a key, or a link, that was valid is so still. Raises DatabaseUnavailable."""
        if principal.key_id is None:
            return True
        async with self._db.reading() as uow:
            if is_key(principal.key_id):
                row = await uow.people.key(principal.key_id)
                return row is not None and self._lasts(row.expires_at) and row.revoked_at is None
            link = await uow.shares.get(principal.key_id)
        return link is not None and self._lasts(link.expires_at)

    async def flush(self) -> None:
        """Write when keys were used last."""
        used, self._used = self._used, {}
        if used:
            async with self._db.writing(alone=False) as uow:
                await uow.people.used(used)

    async def close(self) -> None:
        await super().close()
        try:
            await self.flush()
        except Exception as error:  # only the time of a last use is lost
            _log.warning("the last uses of keys were not written", error=type(error).__name__)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            try:
                await self.flush()
            except DatabaseUnavailable:
                continue
            except Exception as error:
                _log.error("the last uses of keys were not written", exc_info=error)

    async def _by_key(self, key_id: str, secret: str) -> Principal:
        async with self._db.reading() as uow:
            row = await uow.people.key(key_id)
        known = matches(row.digest if row else None, key_id, secret)
        if row is None or not known or row.revoked_at is not None or not self._lasts(row.expires_at):
            raise Unauthenticated(_REFUSED, code="invalid_key")
        return self._holder_of_key(row)

    async def _by_link(self, share_id: str, secret: str) -> Principal:
        async with self._db.reading() as uow:
            row = await uow.shares.get(share_id)
        known = matches(row.digest if row else None, share_id, secret)
        if row is None or not known or not self._lasts(row.expires_at):
            raise Unauthenticated(_REFUSED, code="invalid_key")
        return _holder_of_link(row)

    def _holder_of_key(self, row: KeyRow) -> Principal:
        self._used[row.id] = self._clock.now()
        return Principal(row.user_id, row.id, scopes_of(row.scopes), row.user_id)

    def _lasts(self, expires_at: float | None) -> bool:
        return expires_at is None or expires_at > self._clock.now()


def _holder_of_link(row: ShareRow) -> Principal:
    return Principal(row.id, row.id, frozenset(_INCLUDED[row.access]), row.created_by)


def scopes_of(names: Collection[str]) -> frozenset[str]:
    """With what each includes: who may manage may ask, who may ask may read."""
    return frozenset().union(*(_INCLUDED.get(name, set()) for name in names))


def admin_token(settings: Settings, environment: Mapping[str, str] = os.environ) -> str | None:
    """The first key, as the operator's settings or secret file have it. Raises Invalid, OSError."""
    token = environment.get(ADMIN_VARIABLE, "").strip()
    if not token and settings.admin_key_file:
        token = expanded(settings.admin_key_file, ADMIN_FILE_VARIABLE).read_text(encoding="utf-8").strip()
    if not token:
        return None
    if split(token) is None or not is_key(token):
        raise Invalid(
            f"{ADMIN_VARIABLE}, or the file that {ADMIN_FILE_VARIABLE} names, is no key. One is made by: "
            "preread keys new",
            code="settings",
        )
    return token


async def install_admin_key(db: Database, token: str | None, now: float) -> None:
    """Have the first key in the database. Another one that the settings had before is revoked."""
    if token is None or (parts := split(token)) is None:
        return
    key_id, digest = parts[0], digest_of(*parts)
    async with db.writing() as uow:
        await uow.people.revoke_settings(now, but=key_id)
        row = await uow.people.key(key_id)
        if row is not None and hmac.compare_digest(row.digest, digest):
            if row.revoked_at is not None:
                _log.warning("the key of the settings was revoked, and stays so: make another one", key_id=key_id)
            return
        if row is not None:
            raise Invalid(f"{ADMIN_VARIABLE} has the id of another key: make a new one.", code="settings")
        await uow.people.add(
            KeyRow(
                id=key_id, user_id=LOCAL, name="first key", digest=digest, scopes=[MANAGE, METRICS],
                origin="settings", created_at=now,
            )
        )  # fmt: skip
