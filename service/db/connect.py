"""Engines of SQLAlchemy for the databases that are known: SQLite in a file, and PostgreSQL by its address."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, event, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

BUSY_TIMEOUT_MS = 15_000
CONNECT_S = 5.0
STATEMENT_S = 20.0
"""A server that stands still is given up after this time."""
_POSTGRES = {
    "application_name": "preread",
    # A process that was frozen, or whose host is lost, must not keep others from writing.
    "idle_in_transaction_session_timeout": "10000",
    "lock_timeout": str(BUSY_TIMEOUT_MS),
}


def create_engine(url: str, *, patient: bool = False) -> AsyncEngine:
    """An async engine: for SQLite with its pragmas and a file that is private to the user; for PostgreSQL with limits
    on how long a statement may take, unless it is `patient` (migrations). Raises ImportError without its driver."""
    # hide_parameters: an error of the database must not carry a document's text into the log.
    if is_sqlite(url):
        _private_file(make_url(url).database)
        engine = create_async_engine(url, pool_size=4, max_overflow=4, hide_parameters=True)
        event.listen(engine.sync_engine, "connect", _on_connect)
        event.listen(engine.sync_engine, "begin", _on_begin)
        return engine
    engine = create_async_engine(
        _postgres(make_url(url)),
        pool_size=8,
        max_overflow=8,
        pool_timeout=STATEMENT_S,
        pool_pre_ping=True,
        pool_use_lifo=True,
        hide_parameters=True,
        connect_args={
            "timeout": CONNECT_S,
            "command_timeout": None if patient else STATEMENT_S,
            "server_settings": _POSTGRES | ({"lock_timeout": "0"} if patient else {}),
        },
    )
    event.listen(engine.sync_engine, "before_cursor_execute", _without_nul, retval=True)
    return engine


def is_sqlite(url: str) -> bool:
    return url.startswith("sqlite")


def place_of(url: str) -> str:
    """Where a database is, without user and password: host, port and name of PostgreSQL, a file of SQLite."""
    parts = make_url(url)
    if is_sqlite(url):
        return parts.database or "memory"
    host = parts.host or parts.query.get("host") or "this machine"
    return f"{host}:{parts.port or 5432}/{parts.database or ''}".rstrip("/")


def _postgres(url: URL) -> URL:
    """As people write it: `postgres://` is meant too, and `sslmode` as in other clients."""
    if url.drivername in {"postgres", "postgresql"}:
        url = url.set(drivername="postgresql+asyncpg")
    if (mode := url.query.get("sslmode")) is not None:
        url = url.difference_update_query(["sslmode"]).update_query_dict({"ssl": mode})
    return url


def _private_file(database: str | None) -> None:
    """Also one that was copied there from a backup, which others could read."""
    if database and database != ":memory:":
        Path(database).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(database, os.O_CREAT | os.O_RDWR, 0o600)
        with suppress(OSError):  # one that belongs to another user stays as it is
            os.fchmod(fd, 0o600)
        os.close(fd)


def _on_connect(dbapi_connection: Any, _record: Any) -> None:
    # The driver must not begin transactions by itself: `_on_begin` says which kind.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    for pragma in (
        f"busy_timeout={BUSY_TIMEOUT_MS}",
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        "secure_delete=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _on_begin(connection: Any) -> None:
    write = connection.get_execution_options().get("preread_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _without_nul(_conn: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> Any:
    """PostgreSQL's text has no character 0, which text of documents and answers may have. Another one takes its place,
    so that no position changes."""
    clean = [_clean(each) for each in parameters] if many else _clean(parameters)
    return statement, clean


def _clean(parameters: Any) -> Any:
    if not any(isinstance(value, str) and "\0" in value for value in parameters):
        return parameters
    return tuple(value.replace("\0", "\ufffd") if isinstance(value, str) else value for value in parameters)
