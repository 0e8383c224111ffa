"""Sharing documents and sessions: with a user, with the owner's organization, or by a link."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.core.access import ASK, OWNER, READ, usable_document, usable_session
from service.core.audit import record
from service.core.clock import Clock
from service.core.credentials import LINK as LINK_ID
from service.core.credentials import digest_of, new_secret
from service.core.ids import new_id
from service.core.sessions import SessionService
from service.core.uploads import check_ttl
from service.db.engine import Database
from service.db.people import ShareRow
from service.db.repositories import UnitOfWork
from service.errors import Conflict, Invalid, NotFound

USER, ORGANIZATION, LINK = "user", "organization", "link"
KINDS, LEVELS = (USER, ORGANIZATION, LINK), (READ, ASK)
MAX_SHARES = 200


@dataclass(frozen=True, slots=True)
class Target:
    """What is shared: a document, or a session with its documents."""

    document_id: str | None = None
    session_id: str | None = None

    @property
    def id(self) -> str:
        return self.document_id or self.session_id or ""


@dataclass(frozen=True, slots=True)
class NewShare:
    """With whom (`kind`; `user` is a name in the owner's organization), for what (`read`, `ask`), and how long."""

    kind: str
    access: str = ASK
    user: str | None = None
    ttl_s: int | None = None

    def check(self) -> None:
        """Raises Invalid with the name of the field."""
        if self.kind not in KINDS:
            raise Invalid(f"`with` is {', '.join(KINDS[:-1])} or {KINDS[-1]}.", param="with")
        if self.access not in LEVELS:
            raise Invalid("`access` is read or ask.", param="access")
        if (self.user is not None) != (self.kind == USER):
            raise Invalid("`user` names with whom it is shared, when it is shared with a user.", param="user")
        check_ttl(self.ttl_s)


@dataclass(frozen=True, slots=True)
class Shared:
    """A share, the name of the user or organization, and of a link just made its token."""

    row: ShareRow
    name: str | None = None
    token: str | None = None


class Sharing:
    """Shares are made, listed and revoked by the owner of what is shared."""

    def __init__(self, db: Database, sessions: SessionService, clock: Clock) -> None:
        self._db = db
        self._sessions = sessions
        self._clock = clock

    async def share(self, owner_id: str, target: Target, wanted: NewShare) -> Shared:
        """What is shared with the same user or organization already gets the new access and time.

        Raises NotFound, Forbidden, Invalid, and Conflict for a session over documents of others, and for too many.
        """
        wanted.check()
        now, secret = self._clock.now(), new_secret()
        async with self._db.writing() as uow:
            await self._require_own(uow, owner_id, target, now)
            subject = await _subject(uow, owner_id, wanted)
            row = await _row(uow, owner_id, target, wanted, subject, now)
            if wanted.kind == LINK:
                row.digest = digest_of(row.id, secret)
            await uow.shares.add(row)
            await record(uow, now, owner_id, "share", target.id, row.subject)
            names = await uow.people.names([row.subject])
        return Shared(row, names.get(row.subject), f"{row.id}.{secret}" if wanted.kind == LINK else None)

    async def all(self, owner_id: str, target: Target) -> list[Shared]:
        """Oldest first, without the tokens of links. Raises NotFound, Forbidden."""
        async with self._db.reading() as uow:
            await self._require_own(uow, owner_id, target, self._clock.now())
            rows = await _shares_of(uow, target)
            names = await uow.people.names([row.subject for row in rows])
        return [Shared(row, names.get(row.subject)) for row in rows]

    async def revoke(self, owner_id: str, target: Target, share_id: str) -> None:
        """From the next request on, and the next event of a stream, nobody sees anything by it; what was asked through
        a link is removed. Raises NotFound, Forbidden."""
        async with self._db.writing() as uow:
            now = self._clock.now()
            await self._require_own(uow, owner_id, target, now)
            row = await uow.shares.get(share_id)
            if row is None or (row.document_id, row.session_id) != (target.document_id, target.session_id):
                raise NotFound("There is no such share.")
            made = await uow.sessions.of_owner(share_id) if row.kind == LINK else []
            if not made:
                await uow.shares.remove(share_id)
            else:  # nobody comes by it any more, and its sessions can still be found and removed
                row.digest, row.expires_at = None, 0.0  # over by the clock of every host
            await record(uow, now, owner_id, "unshare", target.id, row.subject)
        if made:
            await self._sessions.delete_all(share_id)
            async with self._db.writing() as uow:
                await uow.shares.remove(share_id)

    async def _require_own(self, uow: UnitOfWork, owner_id: str, target: Target, now: float) -> None:
        if target.document_id is not None:
            await usable_document(uow, owner_id, target.document_id, now, need=OWNER)
            return
        _, documents = await usable_session(uow, owner_id, target.id, now, need=OWNER)
        if any(document.owner_id != owner_id for document in documents):
            raise Conflict(
                "This session is over documents of others: only their owners can share them.", code="not_your_documents"
            )


async def _row(
    uow: UnitOfWork, owner_id: str, target: Target, wanted: NewShare, subject: str | None, now: float
) -> ShareRow:
    """A new share, in place of one with the same subject."""
    known = await _shares_of(uow, target)
    before = next((row for row in known if (row.kind, row.subject) == (wanted.kind, subject)), None)
    if before is not None:
        await uow.shares.remove(before.id)
    elif len(known) >= MAX_SHARES:
        raise Conflict(f"It is shared {MAX_SHARES} times already: revoke one first.", code="too_many_shares")
    share_id = new_id(LINK_ID)
    return ShareRow(
        id=share_id,
        document_id=target.document_id,
        session_id=target.session_id,
        kind=wanted.kind,
        subject=subject or share_id,
        access=wanted.access,
        created_by=owner_id,
        created_at=now,
        expires_at=None if wanted.ttl_s is None else now + wanted.ttl_s,
    )


async def _subject(uow: UnitOfWork, owner_id: str, wanted: NewShare) -> str | None:
    """Id of the user or organization; None for a link. A user of another organization is not told from none."""
    if wanted.kind == LINK:
        return None
    organization_id = await uow.people.organization_of(owner_id)
    if organization_id is None:
        raise Invalid("Only a user can share with others.", param="with")
    if wanted.kind == ORGANIZATION:
        return organization_id
    user = await uow.people.user(organization_id, wanted.user or "")
    if user is None:
        raise Invalid("There is no user of this name in your organization.", param="user", code="no_such_user")
    if user.id == owner_id:
        raise Invalid("It is yours: name somebody else.", param="user")
    return user.id


async def _shares_of(uow: UnitOfWork, target: Target) -> Sequence[ShareRow]:
    if target.document_id is not None:
        return await uow.shares.of_document(target.document_id)
    return await uow.shares.of_session(target.id)
