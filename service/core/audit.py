"""The audit log: who asked, uploaded, changed, deleted, shared what. Ids only, never text.

A line is written in the transaction of what it tells about: neither is there without the other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from service.core.ids import new_id
from service.db.people import AuditRow
from service.db.repositories import UnitOfWork

_KEY: ContextVar[str | None] = ContextVar("key", default=None)


@contextmanager
def acting_with(key_id: str | None) -> Iterator[None]:
    """What is done in this block, and in tasks that it begins, is done with this key."""
    token = _KEY.set(key_id)
    try:
        yield
    finally:
        _KEY.reset(token)


async def record(uow: UnitOfWork, at: float, who: str, action: str, target: str, other: str | None = None) -> None:
    """Write a line. `target` is what it was done to, `other` what that belongs to, or with whom it was shared."""
    row = AuditRow(id=new_id("evt"), at=at, user_id=who, key_id=_KEY.get(), action=action, target=target, other=other)
    await uow.records.add(row)
