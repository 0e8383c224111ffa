"""Which process is believed to live: by its signs of life and a clock of one's own, nothing else."""

import asyncio

import pytest

from service.core.clock import FakeClock
from service.core.leases import Leases
from service.db.engine import Database
from service.db.migrations import upgrade
from service.db.repositories import processes
from service.errors import Unavailable
from tests.service.db.test_database import document

LEASE_S = 10.0


@pytest.fixture
async def db(anyio_backend, database_url):
    await upgrade(database_url)
    database = Database(database_url)
    yield database
    await database.close()


@pytest.fixture
async def process(db):
    """Makes processes, each with a clock of its own; they look about when told to."""

    async def make():
        made = Leases(db, FakeClock(), alone=False, lease_s=LEASE_S)
        await made.register()
        return made

    return make


async def seconds_pass(seconds, *living):
    """`living` look about four times in the time of a lease."""
    for _ in range(round(seconds / (LEASE_S / 4))):
        for each in living:
            each._clock.advance(LEASE_S / 4)
            await each._beat()
            await each._watch()


async def claims(db, process):
    async with db.writing() as uow:
        return await uow.documents.claim("doc_1", process.owner, only_if={"queued"})


async def add_document(db):
    async with db.writing() as uow:
        await uow.documents.add(document())


@pytest.mark.anyio
async def test_only_one_of_many_gets_a_document(db, process):
    await add_document(db)
    all_of_them = [await process() for _ in range(6)]
    assert sorted(await asyncio.gather(*(claims(db, each) for each in all_of_them))) == [False] * 5 + [True]


@pytest.mark.anyio
async def test_a_silent_process_is_given_up_in_time_and_a_living_one_never(db, process):
    await add_document(db)
    silent, living, other = await process(), await process(), await process()
    assert await claims(db, silent)
    await seconds_pass(0.9 * LEASE_S, living, other)
    assert not await claims(db, other)
    await seconds_pass(0.5 * LEASE_S, living, other)
    assert await claims(db, other)
    await seconds_pass(5 * LEASE_S, living, other)
    assert not await claims(db, living)


@pytest.mark.anyio
async def test_a_process_that_comes_back_lives_anew_and_has_nothing(db, process):
    await add_document(db)
    frozen, other = await process(), await process()
    told = []

    async def lost():
        told.append(frozen.owner)

    frozen.lost.append(lost)
    first_life = frozen.owner
    assert await claims(db, frozen)
    await seconds_pass(2 * LEASE_S, other)
    assert await claims(db, other)
    frozen._clock.advance(2 * LEASE_S)
    with pytest.raises(Unavailable):
        await frozen.require()
    assert told == [frozen.owner] != [first_life]
    async with db.writing() as uow:
        assert not await uow.documents.change("doc_1", held_by=first_life, status="ready")
    await frozen.require()


@pytest.mark.anyio
async def test_a_jump_of_the_worlds_clock_does_nothing(db, process, monkeypatch):
    await add_document(db)
    owner, other = await process(), await process()
    assert await claims(db, owner)
    monkeypatch.setattr(processes.time, "time", lambda: 9e9)
    await seconds_pass(3 * LEASE_S, owner, other)
    assert not await claims(db, other)


@pytest.mark.anyio
async def test_an_outage_is_nobodys_silence(db, process, monkeypatch):
    await add_document(db)
    owner, other = await process(), await process()
    assert await claims(db, owner)
    await seconds_pass(LEASE_S / 2, owner, other)
    other._watched.clear()  # what an outage leaves
    other._clock.advance(20 * LEASE_S)
    await seconds_pass(LEASE_S / 2, owner, other)
    assert not await claims(db, other)


@pytest.mark.anyio
async def test_a_machine_that_stood_still_is_nobodys_silence(db, process):
    await add_document(db)
    owner, other = await process(), await process()
    assert await claims(db, owner)
    await seconds_pass(LEASE_S / 4, owner, other)
    other._clock.advance(20 * LEASE_S)
    await other._watch()
    await seconds_pass(LEASE_S, owner, other)
    assert not await claims(db, other)
    await seconds_pass(1.5 * LEASE_S, other)
    assert await claims(db, other)


@pytest.mark.anyio
async def test_a_process_that_leaves_is_not_waited_for(db, process):
    await add_document(db)
    leaving, other = await process(), await process()
    assert await claims(db, leaving)
    await leaving.close()
    assert await claims(db, other)


@pytest.mark.anyio
async def test_one_that_is_alone_takes_all_at_once(db, process):
    await add_document(db)
    killed = await process()
    assert await claims(db, killed)
    alone = Leases(db, FakeClock(), alone=True, lease_s=LEASE_S)
    await alone.register()
    assert await claims(db, alone)
