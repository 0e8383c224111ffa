"""Browsers that signed in. A cookie stands for a key, or a link, and holds neither: it is `id.secret` of a row of its
own, of which only a hash is stored. Revoking the key, or the link, ends all that stand for it at once."""

from dataclasses import dataclass

from service.core.clock import Clock
from service.core.credentials import digest_of, matches, new_secret
from service.core.ids import new_id
from service.core.keys import Keys, Principal
from service.db.engine import Database
from service.db.people import WebSessionRow
from service.errors import Unauthenticated

LASTS_S = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class SignedIn:
    """Who it is, and the cookie's value; None on a server without keys, where nobody signs in."""

    principal: Principal
    cookie: str | None


class WebSessions:
    """Signs browsers in and out, and knows them again."""

    def __init__(self, db: Database, keys: Keys, clock: Clock) -> None:
        self._db = db
        self._keys = keys
        self._clock = clock

    async def sign_in(self, token: str) -> SignedIn:
        """By a key, or a link's token. Raises Unauthenticated, DatabaseUnavailable."""
        principal = await self._keys.principal(token)
        if principal.key_id is None:
            return SignedIn(principal, None)
        now, secret = self._clock.now(), new_secret()
        row = WebSessionRow(id=new_id("web"), key_id=principal.key_id, created_at=now, expires_at=now + LASTS_S)
        row.digest = digest_of(row.id, secret)
        async with self._db.writing() as uow:
            await uow.web_sessions.remove_expired(now)
            await uow.web_sessions.add(row)
        return SignedIn(principal, f"{row.id}.{secret}")

    async def principal(self, cookie: str) -> Principal:
        """Who signed in. Raises Unauthenticated when it is over, or the key is not valid any more,
        DatabaseUnavailable."""
        session_id, _, secret = cookie.partition(".")
        async with self._db.reading() as uow:
            row = await uow.web_sessions.get(session_id)
        known = matches(row.digest if row else None, session_id or "none", secret)
        if row is None or not known or row.expires_at <= self._clock.now():
            raise Unauthenticated("You are signed in no longer: sign in again.", code="signed_out")
        return await self._keys.holder(row.key_id)

    async def sign_out(self, cookie: str) -> None:
        """Raises Unauthenticated for a cookie that is none, DatabaseUnavailable."""
        await self.principal(cookie)
        async with self._db.writing() as uow:
            await uow.web_sessions.remove(cookie.partition(".")[0])

    async def name_of(self, principal: Principal) -> str:
        """Of the user; empty for a link."""
        async with self._db.reading() as uow:
            return (await uow.people.names([principal.user_id])).get(principal.user_id, "")
