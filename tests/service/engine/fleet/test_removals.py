"""Deletions reach the disk of a worker that was away, once."""

import errno
from pathlib import Path

import pytest

from service.engine.fleet.link import Link
from service.engine.fleet.removals import Removals
from tests.service.engine.fleet.conftest import DOC, build, until

pytestmark = pytest.mark.anyio


class Disk:
    def __init__(self) -> None:
        self.deleted: list[tuple[str, str, str]] = []

    def delete(self, owner_id: str, kind: str, id: str) -> dict[str, tuple[int, int]]:
        self.deleted.append((owner_id, kind, id))
        return {"disk": (1, 10), "redis": (5, 50)}


async def test_a_worker_that_was_away_deletes_what_it_missed(fleet, tmp_path):
    here, away = Disk(), Disk()
    await fleet.worker("w1", delete=here.delete, deletions=tmp_path / "w1")
    await fleet.worker("w2", delete=away.delete, deletions=tmp_path / "w2")
    client = await fleet.client()
    await build(client)
    await until(lambda: (tmp_path / "w2").exists())
    await fleet.draining("w2")
    await until(lambda: len(client.workers) == 1)
    done = await client.delete("own", [("document", DOC.document_id)])
    assert (done.objects, done.nbytes) == (1, 10)
    assert here.deleted == [("own", "document", "doc")]
    assert away.deleted == []
    await fleet.worker("w2", delete=away.delete, deletions=tmp_path / "w2")
    await until(lambda: away.deleted)
    assert away.deleted == [("own", "document", "doc")]


async def test_each_deletion_is_done_once_and_a_new_disk_does_none(fleet, redis_server, tmp_path):
    await fleet.worker("w")
    client = await fleet.client()
    await client.delete("own", [("document", "old")])
    disk, link = Disk(), Link(redis_server.url)
    removals = Removals(link, disk.delete, tmp_path / "done")
    await removals.catch_up()
    assert disk.deleted == []
    await client.delete("own", [("document", "new"), ("turn", "t")])
    await removals.catch_up()
    await removals.catch_up()
    assert disk.deleted == [("own", "document", "new"), ("own", "turn", "t")]
    await Removals(link, disk.delete, tmp_path / "done").catch_up()
    assert len(disk.deleted) == 2
    await link.close()


async def test_a_deletion_that_fails_on_the_disk_does_not_stop_those_after_it(fleet, redis_server, tmp_path):
    await fleet.worker("w")
    client = await fleet.client()
    deleted = []

    def delete(owner_id: str, kind: str, id: str) -> dict[str, tuple[int, int]]:
        if id == "bad":
            raise OSError("no")
        deleted.append(id)
        return {}

    link = Link(redis_server.url)
    removals = Removals(link, delete, tmp_path / "done")
    await removals.catch_up()
    for id in ("bad", "good"):
        await client.delete("own", [("document", id)])
    await removals.catch_up()
    assert deleted == ["good"]
    await link.close()


async def test_a_full_disk_does_not_end_the_following(fleet, redis_server, tmp_path, monkeypatch):
    """What could not be noted is followed again later; what was noted before stays."""
    await fleet.worker("w")
    client = await fleet.client()
    await client.delete("own", [("document", "old")])
    disk, link, path = Disk(), Link(redis_server.url), tmp_path / "done"
    removals = Removals(link, disk.delete, path)
    await removals.catch_up()
    before = path.read_text()
    await client.delete("own", [("document", "new")])
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_text", full)
        await removals.catch_up()
    assert path.read_text() == before
    await removals.catch_up()
    assert path.read_text() != before
    assert disk.deleted == [("own", "document", "new")] * 2
    await link.close()


def full(path: Path, text: str) -> int:
    """As on a full disk: there is a file, and nothing in it."""
    path.touch()
    raise OSError(errno.ENOSPC, "No space left on device")
