"""What `preread keys` does: keys of users, made, listed and revoked in the database; no server is needed."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.core.audit import record
from service.core.clock import Clock
from service.core.credentials import KEY, digest_of, new_secret
from service.core.ids import new_id
from service.core.keys import SCOPES
from service.db.engine import Database
from service.db.people import LOCAL, KeyRow, OrganizationRow, UserRow
from service.db.repositories import UnitOfWork
from service.errors import Invalid, NotFound
from service.words import counted

MAX_NAME_CHARS = 100
OPERATOR = "operator"
"""Who the audit log names for what was done at the terminal."""


@dataclass(frozen=True, slots=True)
class ListedKey:
    """A key with the names of its user and organization."""

    row: KeyRow
    user: str
    organization: str

    def state(self, now: float) -> str:
        """`active`, `expired` or `revoked`."""
        if self.row.revoked_at is not None:
            return "revoked"
        return "expired" if self.row.expires_at is not None and self.row.expires_at <= now else "active"


class KeyRing:
    """Keys as the operator manages them."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    async def create(
        self,
        *,
        user: str,
        organization: str,
        name: str = "",
        scopes: Sequence[str],
        ttl_s: float | None = None,
    ) -> tuple[ListedKey, str]:
        """A new key, and its token, which is not kept. User and organization are made if there are none of these names.
        Raises Invalid."""
        for what, text in (("user", user), ("organization", organization), ("name", name)):
            _check_name(what, text)
        if not scopes or not set(scopes) <= set(SCOPES):
            raise Invalid(f"A key has one or several of the scopes {', '.join(SCOPES)}.", param="scope")
        now, key_id, secret = self._clock.now(), new_id(KEY), new_secret()
        row = KeyRow(
            id=key_id,
            name=name,
            digest=digest_of(key_id, secret),
            scopes=[scope for scope in SCOPES if scope in scopes],
            created_at=now,
            expires_at=None if ttl_s is None else now + ttl_s,
        )
        async with self._db.writing() as uow:
            row.user_id = await _user(uow, user, organization, now)
            await uow.people.add(row)
            await record(uow, now, OPERATOR, "key", key_id, row.user_id)
        return ListedKey(row, user, organization), f"{key_id}.{secret}"

    async def all(self) -> list[ListedKey]:
        """Oldest first, revoked ones too."""
        async with self._db.reading() as uow:
            return [ListedKey(*found) for found in await uow.people.keys()]

    async def revoke(self, key_id: str) -> None:
        """Refuse a key from the next request on. Raises NotFound."""
        async with self._db.writing() as uow:
            if not await uow.people.revoke(key_id, self._clock.now()):
                raise NotFound(f"There is no key {key_id[:80]!r}, or it was revoked before.")
            await record(uow, self._clock.now(), OPERATOR, "key.revoke", key_id)


def _check_name(what: str, text: str) -> None:
    if len(text) > MAX_NAME_CHARS or not text.isprintable() or (what != "name" and not text.strip()):
        raise Invalid(f"The {what} has 1 to {counted(MAX_NAME_CHARS, 'printable character')}.", param=what)


async def _user(uow: UnitOfWork, name: str, organization: str, now: float) -> str:
    """Id of the user of an organization; both are made where they are not there."""
    found = await uow.people.organization(organization)
    if found is None:
        found = OrganizationRow(id=new_id("org"), name=organization, created_at=now)
        await uow.people.add(found)
    user = await uow.people.user(found.id, name)
    if user is None:
        user = UserRow(id=new_id("usr"), organization_id=found.id, name=name, created_at=now)
        await uow.people.add(user)
    return user.id


__all__ = ["LOCAL", "OPERATOR", "KeyRing", "ListedKey"]
