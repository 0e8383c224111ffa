"""`Idempotency-Key`: a request that is sent again, because its answer was lost on the way, is not done twice."""

import hashlib

from service.db.models import TurnRow
from service.db.people import RepeatRow
from service.db.repositories import UnitOfWork
from service.errors import Invalid

MAX_KEY_CHARS = 200
KEPT_S = 24 * 3600.0


class Repeated(Exception):
    """The request was done before, meanwhile; `target` is what it made."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.target = target


class Repeat:
    """One key of one owner, for one `kind` of request, with a digest of what was asked for."""

    def __init__(self, kind: str, owner_id: str, key: str, *parts: str, anywhere: bool = False) -> None:
        """`anywhere`: what it made may be in any of the owner's sessions. Raises Invalid for a key that is none."""
        if not (0 < len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable()):
            raise Invalid(
                f"Idempotency-Key has 1 to {MAX_KEY_CHARS} printable characters of ASCII.", param="Idempotency-Key"
            )
        self._owner_id = owner_id
        self._anywhere = anywhere
        self._key = f"{kind}:{key}"
        self._fingerprint = hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()

    async def target(self, uow: UnitOfWork) -> str | None:
        """What the key made before, if anything. Raises Invalid when that was another request."""
        row = await uow.records.repeated(self._owner_id, self._key)
        if row is None:
            return None
        if row.fingerprint != self._fingerprint:
            raise Invalid(
                "This Idempotency-Key was used for another request: take a new one for each.",
                code="idempotency_key_reused",
                param="Idempotency-Key",
            )
        return row.target

    async def answer(self, uow: UnitOfWork, session_id: str) -> TurnRow | None:
        """The answer that the key made before, unless it failed. Raises as `target`."""
        if (answer_id := await self.target(uow)) is None:
            return None
        if self._anywhere:
            turn = await uow.chats.turn_of(self._owner_id, answer_id)
        else:
            turn = await uow.turns.get(session_id, answer_id)
        return turn if turn is not None and turn.status != "failed" else None

    async def keep(self, uow: UnitOfWork, target: str, now: float) -> None:
        """Remember what this request made, in place of what it made before."""
        await uow.records.forget_repeat(self._owner_id, self._key)
        row = RepeatRow(
            owner_id=self._owner_id, key=self._key, fingerprint=self._fingerprint, target=target, created_at=now
        )
        await uow.records.add(row)
