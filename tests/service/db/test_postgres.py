"""PostgreSQL that goes away and comes back, stands still, or is shared by several processes."""

import asyncio
import time

import pytest

from service.db import connect, engine
from service.db.engine import Database
from service.db.migrations import check, upgrade
from service.errors import DatabaseUnavailable, ServiceError
from tests.service.db.test_database import document


@pytest.fixture
async def url(anyio_backend, postgres):
    made = postgres.new_database()
    await upgrade(made)
    return made


@pytest.fixture
async def db(url):
    database = Database(url)
    yield database
    await database.close()


async def until_it_answers(db, within_s=60.0):
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await db.ping()
            except DatabaseUnavailable:
                await asyncio.sleep(0.05)


@pytest.mark.anyio
async def test_a_killed_server_is_told_and_the_same_database_goes_on_when_it_is_back(db, postgres):
    async with db.writing() as uow:
        await uow.documents.add(document())
    with pytest.raises(DatabaseUnavailable):  # noqa: PT012 - the block is the unit of work
        async with db.writing() as uow:
            await uow.documents.change("doc_1", title="half")
            await asyncio.to_thread(postgres.kill)
            await uow.documents.change("doc_1", title="done")
    for unit in (db.reading, db.writing):
        with pytest.raises(DatabaseUnavailable) as told:
            async with unit() as uow:
                await uow.documents.ids()
        assert told.value.retry_after_s > 0
    await asyncio.to_thread(postgres.start)
    await until_it_answers(db)
    async with db.reading() as uow:
        assert (await uow.documents.get("doc_1")).title == "t"


@pytest.mark.anyio
async def test_connections_that_were_idle_over_a_restart_are_made_anew(db, postgres):
    await asyncio.gather(*(db.ping() for _ in range(4)))
    await asyncio.to_thread(postgres.kill)
    await asyncio.to_thread(postgres.start)
    await asyncio.gather(*(db.ping() for _ in range(8)))


@pytest.mark.anyio
async def test_a_server_that_stands_still_is_given_up_in_time(url, postgres, monkeypatch):
    monkeypatch.setattr(connect, "CONNECT_S", 0.5)
    monkeypatch.setattr(connect, "STATEMENT_S", 0.5)
    db = Database(url)
    await db.ping()
    postgres.freeze()
    began = time.monotonic()
    results = await asyncio.gather(*(_title(db, f"t{n}") for n in range(30)), return_exceptions=True)
    took = time.monotonic() - began
    postgres.thaw()
    assert {type(each) for each in results} == {DatabaseUnavailable}
    assert took < 15, "those in line waited one after another"
    await until_it_answers(db)
    await db.close()


@pytest.mark.anyio
async def test_the_end_does_not_wait_for_a_server_that_stands_still(url, postgres, monkeypatch):
    monkeypatch.setattr(engine, "LEAVE_S", 0.3)
    db = Database(url)
    await asyncio.gather(*(db.ping() for _ in range(4)))
    postgres.freeze()
    try:
        stuck = asyncio.create_task(_title(db, "t"))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(15):  # each connection would wait for the server for 20 seconds
            await db.leave()
            with pytest.raises(DatabaseUnavailable):
                await db.ping()
            stuck.cancel()
            await asyncio.wait({stuck})
            await db.close()
    finally:
        postgres.thaw()


@pytest.mark.anyio
async def test_a_server_that_answers_stays_in_use_to_the_end(db):
    await db.leave()
    await db.ping()


async def _title(db, title):
    async with db.writing() as uow:
        await uow.documents.change("doc_1", title=title)


@pytest.mark.anyio
async def test_writers_of_two_processes_wait_for_each_other(db, url):
    other = Database(url)
    async with db.writing() as uow:
        await uow.documents.add(document(progress_done=0))

    async def increment(database):
        async with database.writing() as uow:
            row = await uow.documents.get("doc_1")
            await asyncio.sleep(0)
            await uow.documents.change("doc_1", progress_done=row.progress_done + 1)

    await asyncio.gather(*(increment(database) for database in (db, other) for _ in range(10)))
    async with db.reading() as uow:
        assert (await uow.documents.get("doc_1")).progress_done == 20
    await other.close()


@pytest.mark.anyio
async def test_a_reading_unit_sees_one_state(db):
    async with db.writing() as uow:
        await uow.documents.add(document())
    async with db.reading() as before:
        assert await before.documents.ids() == {"doc_1"}
        async with db.writing() as uow:
            await uow.documents.add(document("doc_2", "other"))
        assert await before.documents.ids() == {"doc_1"}


@pytest.mark.anyio
async def test_a_process_that_stops_in_the_middle_of_a_write_does_not_keep_the_others(db, url, monkeypatch):
    monkeypatch.setitem(connect._POSTGRES, "idle_in_transaction_session_timeout", "300")
    frozen = Database(url)
    with pytest.raises(DatabaseUnavailable):  # noqa: PT012
        async with frozen.writing() as uow:
            await uow.documents.ids()
            async with db.writing() as other:
                await other.documents.add(document())
            await uow.documents.ids()
    async with db.reading() as uow:
        assert await uow.documents.ids() == {"doc_1"}
    await frozen.close()


@pytest.mark.anyio
async def test_text_with_a_character_that_postgresql_has_not_is_kept_and_found(db):
    async with db.writing() as uow:
        await uow.documents.add(document(title="a\0b", warnings=["c\0d"]))
    async with db.reading() as uow:
        assert (await uow.documents.get("doc_1")).title == "a\ufffdb"
        assert await uow.documents.get("doc\0_1") is None


@pytest.mark.anyio
async def test_a_database_that_was_not_migrated_is_told(postgres):
    url = postgres.new_database()
    with pytest.raises(ServiceError, match="preread db upgrade"):
        await check(url)
    await asyncio.gather(*(upgrade(url) for _ in range(3)))  # as several hosts may, at the same time
    await check(url)


@pytest.mark.anyio
async def test_nobody_is_shown_a_password(postgres):
    with pytest.raises(ServiceError) as told:
        await check(f"postgresql://preread:very-secret@127.0.0.1:{postgres.port}/none_such")
    assert "very-secret" not in str(told.value)
    assert "none_such" in str(told.value)


def test_addresses_as_people_write_them_are_taken():
    url = connect._postgres(connect.make_url("postgres://u:p@h/d?sslmode=require"))
    assert url.render_as_string(hide_password=False) == "postgresql+asyncpg://u:p@h/d?ssl=require"
