"""What all repositories do with rows."""

from typing import Any, cast

from sqlalchemy import CursorResult
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.errors import AlreadyExists


async def insert(session: AsyncSession, row: Any, key: str) -> None:
    """Add a row. Raises AlreadyExists with `key` when another one has a value that only one may have."""
    session.add(row)
    try:
        await session.flush()
    except IntegrityError as error:
        raise AlreadyExists(key) from error


async def changed(session: AsyncSession, query: Any) -> int:
    """Change or remove rows in the database itself, and how many there were; rows read before are not looked at."""
    result = await session.execute(query.execution_options(synchronize_session=False))
    return cast("CursorResult[Any]", result).rowcount
