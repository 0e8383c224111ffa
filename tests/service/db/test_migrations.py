"""The migrations make exactly the tables the models describe, and can be taken back."""

import contextlib
import os
import sqlite3
import stat

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from service.db.connect import create_engine
from service.db.migrations import downgrade, upgrade
from service.db.models import Base


async def _run(url, step):
    engine = create_engine(url)
    async with engine.connect() as connection:
        result = await connection.run_sync(step)
    await engine.dispose()
    return result


@pytest.mark.anyio
async def test_upgrade_from_empty_equals_the_models(database_url, tmp_path):
    await upgrade(database_url)
    await upgrade(database_url)
    difference = await _run(
        database_url,
        lambda c: compare_metadata(MigrationContext.configure(c, opts={"compare_type": True}), Base.metadata),
    )
    assert difference == []
    if database_url.startswith("sqlite"):
        assert stat.S_IMODE(os.stat(tmp_path / "a.sqlite3").st_mode) == 0o600


@pytest.mark.anyio
async def test_a_database_from_a_backup_becomes_private(tmp_path):
    path = tmp_path / "a.sqlite3"
    path.touch(mode=0o644)
    path.chmod(0o644)
    await upgrade(f"sqlite+aiosqlite:///{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.anyio
async def test_downgrade_leaves_nothing_but_the_version_table(database_url):
    await upgrade(database_url)
    await downgrade(database_url, "base")
    assert await _run(database_url, lambda c: inspect(c).get_table_names()) == ["alembic_version"]


@pytest.mark.anyio
async def test_rows_of_the_first_tables_are_kept_up_and_down(tmp_path):
    path = tmp_path / "a.sqlite3"
    url = f"sqlite+aiosqlite:///{path}"
    await upgrade(url, "0001")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        _fill(connection)
        before = _rows(connection)
    await upgrade(url)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT spans, notice FROM turns").fetchall() == [("[]", None)]
        assert connection.execute("SELECT * FROM session_documents").fetchall() == [("ses_1", 0, "doc_1")]
        assert connection.execute("SELECT policy, snapshot_index_nbytes FROM documents").fetchall() == [(None, None)]
        users = "SELECT users.id, organizations.id FROM users JOIN organizations ON organization_id = organizations.id"
        assert connection.execute(users).fetchall() == [("local", "local")], "the owner of what there was"
        assert connection.execute("SELECT owner_id, instructions FROM sessions").fetchall() == [("1", "")]
    await downgrade(url, "0001")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert _rows(connection) == before


def _fill(connection):
    """A row in each of three tables, with something in every column that must have it."""
    connection.execute("PRAGMA foreign_keys = ON")
    for table, own in (
        ("documents", {"id": "doc_1"}),
        ("sessions", {"id": "ses_1", "document_id": "doc_1"}),
        ("turns", {"id": "ans_1", "session_id": "ses_1"}),
    ):
        columns = connection.execute(f"SELECT name FROM pragma_table_info('{table}') WHERE \"notnull\"").fetchall()
        values = {name: own.get(name, "1") for (name,) in columns}
        marks = ", ".join("?" * len(values))
        connection.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))
    connection.commit()


def _rows(connection):
    return [connection.execute(f"SELECT * FROM {table}").fetchall() for table in ("documents", "sessions", "turns")]
