"""What goes wrong in a database, as the use cases are told: it is full, or it does not answer now."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from service.errors import CommitUnknown, DatabaseUnavailable, ServiceError, StorageFull

RETRY_AFTER_S = 2
_DETAIL = "The database does not answer: try again."
_FULL = ("database or disk is full", "disk i/o error")
_FULL_STATE = "53100"
_SERVER_FAILED = "XX"
_LOCKED = "database is locked"
# Connection lost or refused, server stopping or starting, out of memory, connections or files; its system failed; a
# deadlock, a lock or a statement that took too long, a transaction that stood still; a server that became a standby.
_AWAY = ("08", "57P", "53", "58", "40001", "40P01", "55P03", "57014", "25P03", "25006")


@contextmanager
def faults() -> Iterator[None]:
    """Raises StorageFull for a disk that refuses a write, DatabaseUnavailable for a database that is not there or busy
    beyond its time; both leave nothing half done."""
    try:
        yield
    except (SQLAlchemyError, ConnectionError, TimeoutError) as error:
        if is_full(error):
            raise StorageFull("The disk refused a write to the database: free some space, try again.") from error
        if is_away(error):
            raise unavailable() from error
        raise


@contextmanager
def connecting() -> Iterator[None]:
    """The same while a connection is made, when every fault of the operating system means that there is none, and one
    within the server too: on a full disk PostgreSQL cannot write what it makes for the first of its connections."""
    try:
        with faults():
            yield
    except OSError as error:
        raise unavailable() from error
    except DBAPIError as error:
        if _state_of(error).startswith(_SERVER_FAILED):
            raise unavailable() from error
        raise


@contextmanager
def committing(*, is_elsewhere: bool) -> Iterator[None]:
    """Raises CommitUnknown where a database in another process may have heard what it did not answer."""
    try:
        yield
    except (SQLAlchemyError, ConnectionError, TimeoutError) as error:
        if is_elsewhere and is_away(error):
            raise CommitUnknown(_DETAIL, retry_after_s=RETRY_AFTER_S) from error
        raise


def unavailable(place: str = "") -> DatabaseUnavailable:
    error = DatabaseUnavailable(_DETAIL, retry_after_s=RETRY_AFTER_S)
    error.place = place
    return error


def is_full(error: Exception) -> bool:
    if _state_of(error) == _FULL_STATE:
        return True
    return isinstance(error, OperationalError) and any(sign in str(error.orig).lower() for sign in _FULL)


def is_away(error: Exception) -> bool:
    """Whether trying again can help."""
    if isinstance(error, ConnectionError | TimeoutError | NoConnectionLeft):
        return True
    if not isinstance(error, DBAPIError):
        return False
    locked = isinstance(error, OperationalError) and _LOCKED in str(error.orig)
    # The driver's own: a connection that was cut in the middle of something; the next one is another.
    cut = isinstance(error, InterfaceError) and not isinstance(error.orig, sqlite3.Error)
    return error.connection_invalidated or locked or cut or _state_of(error).startswith(_AWAY)


@contextmanager
def opening() -> Iterator[None]:
    """Say in a sentence why a database cannot be opened or migrated; its URL may hold a password and is not shown."""
    try:
        yield
    except ImportError as error:
        raise ServiceError(
            f"The database cannot be used: {error}. PostgreSQL needs the extra: pip install 'preread[postgres]'.",
            code="database_unusable",
        ) from error
    except (SQLAlchemyError, CommandError) as error:
        raise ServiceError(
            f"The database cannot be used: {getattr(error, 'orig', None) or error}. Check PREREAD_DATABASE_URL; put a "
            "backup in the place of a damaged file.",
            code="database_unusable",
        ) from error


def _state_of(error: Exception) -> str:
    """The SQLSTATE that PostgreSQL gave, or nothing."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) or ""
