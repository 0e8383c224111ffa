"""Units of work: all or nothing, one writer at a time, and full disks that say so."""

import asyncio
import sqlite3

import aiosqlite
import pytest
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.connect import place_of
from service.db.engine import Database
from service.db.errors import AlreadyExists
from service.db.migrations import upgrade
from service.db.models import DocumentRow, PageRow, SessionDocumentRow, SessionRow, TurnRow
from service.errors import DatabaseUnavailable, StorageFull


def document(id="doc_1", key="k", **values):
    return DocumentRow(
        id=id, owner_id="o", dedupe_key=key, filename="f", nbytes=1, sha256="0", created_at=1.0, updated_at=1.0,
        **({"title": "t"} | values),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql+asyncpg://u:p@db.example:6000/lights", "db.example:6000/lights"),
        ("postgres://u:p@db.example", "db.example:5432"),
        ("postgresql:///lights?host=/run/postgresql", "/run/postgresql:5432/lights"),
        ("sqlite+aiosqlite:////data/a.sqlite3", "/data/a.sqlite3"),
    ],
)
def test_a_place_has_no_user_and_no_password(url, place):
    assert place_of(url) == place


@pytest.fixture
async def db(anyio_backend, database_url):
    await upgrade(database_url)
    database = Database(database_url)
    yield database
    await database.close()


@pytest.fixture
async def sqlite(anyio_backend, tmp_path):
    url = f"sqlite+aiosqlite:///{tmp_path / 'a.sqlite3'}"
    await upgrade(url)
    database = Database(url)
    yield database
    await database.close()


@pytest.mark.anyio
async def test_who_is_cancelled_in_a_commit_leaves_neither_half_of_it_nor_a_broken_connection(
    sqlite, monkeypatch, caplog
):
    given_back, rollback = asyncio.Event(), aiosqlite.Connection.rollback

    async def slow(connection):
        given_back.set()
        await asyncio.sleep(0.05)
        await rollback(connection)

    async def write():
        async with sqlite.writing() as uow:
            await uow.documents.add(document())
            monkeypatch.setattr(aiosqlite.Connection, "rollback", slow)

    task = asyncio.create_task(write())
    await given_back.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    monkeypatch.undo()
    async with sqlite.reading() as uow:
        assert await uow.documents.get("doc_1", "o") is not None
    assert [record for record in caplog.records if record.name.startswith("sqlalchemy")] == []


class Gone(Exception):
    sqlstate = "08003"


@pytest.mark.anyio
async def test_a_database_that_goes_away_when_all_is_done_takes_nothing(sqlite, monkeypatch):
    close = AsyncSession.close

    async def broken(session):
        await close(session)
        raise DBAPIError("ROLLBACK", None, Gone())

    monkeypatch.setattr(AsyncSession, "close", broken)
    async with sqlite.writing() as uow:
        await uow.documents.add(document())
    async with sqlite.reading() as uow:
        assert await uow.documents.ids() == {"doc_1"}
    with pytest.raises(DatabaseUnavailable):
        async with sqlite.reading():
            raise DatabaseUnavailable("gone before")


@pytest.mark.anyio
async def test_a_unit_that_raises_writes_nothing(db):
    with pytest.raises(RuntimeError):  # noqa: PT012 - the block is the unit of work
        async with db.writing() as uow:
            await uow.documents.add(document())
            raise RuntimeError
    async with db.reading() as uow:
        assert await uow.documents.get("doc_1") is None


@pytest.mark.anyio
async def test_a_unique_key_is_refused_and_the_first_stays(db):
    async with db.writing() as uow:
        await uow.documents.add(document())
    with pytest.raises(AlreadyExists):
        async with db.writing() as uow:
            await uow.documents.add(document("doc_2"))
    async with db.reading() as uow:
        assert await uow.documents.ids() == {"doc_1"}


@pytest.mark.anyio
async def test_writers_wait_for_each_other(db):
    async with db.writing() as uow:
        await uow.documents.add(document(progress_done=0))

    async def increment():
        async with db.writing() as uow:
            row = await uow.documents.get("doc_1")
            await asyncio.sleep(0)
            await uow.documents.change("doc_1", progress_done=row.progress_done + 1)

    await asyncio.gather(*(increment() for _ in range(20)))
    async with db.reading() as uow:
        assert (await uow.documents.get("doc_1")).progress_done == 20


@pytest.mark.anyio
async def test_a_claim_succeeds_once(db):
    async with db.writing() as uow:
        await uow.documents.add(document())

    async def claim():
        async with db.writing() as uow:
            return await uow.documents.change("doc_1", only_if={"queued"}, status="parsing")

    assert sorted(await asyncio.gather(*(claim() for _ in range(5)))) == [False] * 4 + [True]


@pytest.mark.anyio
async def test_a_removed_document_takes_its_pages_sessions_and_turns(db):
    async with db.writing() as uow:
        await uow.documents.add(document())
        await uow.pages.replace("doc_1", [PageRow(document_id="doc_1", number=1, text="x")])
        its = [SessionDocumentRow(ordinal=0, document_id="doc_1")]
        row = SessionRow(id="s", owner_id="o", document_id="doc_1", documents=its, created_at=1.0, updated_at=1.0)
        uow.session.add(row)
        await uow.session.flush()
        uow.session.add(TurnRow(id="a", session_id="s", ordinal=1, question="q", created_at=1.0, kv_id="kv"))
    async with db.writing() as uow:
        assert await uow.deletions.turns_of("doc_1") == [("o", "kv", 1)]
        await uow.documents.remove("doc_1")
    async with db.reading() as uow:
        assert await uow.pages.all("doc_1") == []
        assert await uow.session.get(SessionRow, "s") is None
        assert await uow.session.get(TurnRow, "a") is None


@pytest.mark.anyio
async def test_a_full_disk_is_said_and_what_was_there_stays(sqlite):
    async with sqlite.writing() as uow:
        await uow.documents.add(document())
    async with sqlite.engine.connect() as connection:
        size = (await connection.exec_driver_sql("PRAGMA page_count")).scalar_one()
        await connection.exec_driver_sql(f"PRAGMA max_page_count={size}")
        await connection.rollback()
    with pytest.raises(StorageFull):  # noqa: PT012
        async with sqlite.writing() as uow:
            pages = [PageRow(document_id="doc_1", number=n, text="x" * 10_000) for n in range(1, 50)]
            await uow.pages.replace("doc_1", pages)
    async with sqlite.reading() as uow:
        assert await uow.pages.all("doc_1") == []
        assert await uow.documents.get("doc_1") is not None


@pytest.mark.anyio
async def test_the_file_is_in_wal_mode_and_checks_foreign_keys(sqlite, tmp_path):
    with sqlite3.connect(tmp_path / "a.sqlite3") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()
    with pytest.raises(Exception, match="FOREIGN KEY"):
        async with sqlite.writing() as uow:
            await uow.pages.replace("doc_none", [PageRow(document_id="doc_none", number=1, text="x")])
