"""What is pinned reaches the disk of every worker, also one that was away, and outlives a Redis that forgets."""

import pytest

from service.engine.fleet import keys
from service.engine.fleet.pins import Pins
from service.engine.messages import DocumentRef
from tests.service.engine.fleet.conftest import until

pytestmark = pytest.mark.anyio
A, B = DocumentRef("own", "a"), DocumentRef("own", "b")


class Disk:
    def __init__(self) -> None:
        self.pinned: set[tuple[str, str]] = {("own", "from before")}

    def pin_only(self, documents) -> None:
        self.pinned = set(documents)


def reading(*documents: DocumentRef):
    async def read() -> list[DocumentRef]:
        return list(documents)

    return read


async def test_every_worker_keeps_what_is_pinned_and_nothing_else(fleet):
    one, other, late = Disk(), Disk(), Disk()
    await fleet.worker("w1", pin_only=one.pin_only)
    await fleet.worker("w2", pin_only=other.pin_only)
    client = await fleet.client()
    await client.pin_only(reading(A, B))
    await until(lambda: one.pinned == other.pinned == {("own", "a"), ("own", "b")})
    await client.pin_only(reading(B))
    await until(lambda: one.pinned == other.pinned == {("own", "b")})
    await fleet.worker("w3", pin_only=late.pin_only)
    await until(lambda: late.pinned == {("own", "b")})
    await client.pin_only(reading())
    await until(lambda: one.pinned == other.pinned == set())
    await until(lambda: late.pinned == set())


async def test_a_redis_that_forgot_unpins_nothing_and_is_told_again(fleet, redis_server):
    disk = Disk()
    await fleet.worker("w", pin_only=disk.pin_only)
    client = await fleet.client()
    await client.pin_only(reading(A))
    await until(lambda: disk.pinned == {("own", "a")})
    pins = Pins(client._link, disk.pin_only)
    connection = redis_server.client()
    connection.delete(keys.PINNED)
    await pins.follow()
    connection.sadd(keys.PINNED, keys.member(B))  # by one who does not know that there were others
    await pins.follow()
    connection.close()
    assert disk.pinned == {("own", "a")}
    await client.pin_only(reading(A, B))
    await until(lambda: disk.pinned == {("own", "a"), ("own", "b")})


async def test_what_another_process_pins_meanwhile_stays(fleet):
    disk = Disk()
    await fleet.worker("w", pin_only=disk.pin_only)
    client, other = await fleet.client(), await fleet.client()

    async def read() -> list[DocumentRef]:
        await other.pin_only(reading(A))
        return [A, B]

    await client.pin_only(read)
    await client.pin_only(reading(A, B))
    await until(lambda: disk.pinned == {("own", "a"), ("own", "b")})


async def test_a_disk_that_refuses_does_not_end_a_worker(fleet):
    def full(documents) -> None:
        raise OSError("no space left")

    disk = Disk()
    await fleet.worker("w1", pin_only=full)
    await fleet.worker("w2", pin_only=disk.pin_only)
    client = await fleet.client()
    await client.pin_only(reading(A))
    await until(lambda: disk.pinned == {("own", "a")})
    await until(lambda: len(client.workers) == 2)
