"""A disk that is full during an upload, a prefill, a question: a clear error, nothing left, and it goes on after."""

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, files_below, until
from tests.e2e.small_disk import SmallDisk, small_disk
from tests.e2e.sse import events_of

SMALL = b"The ferry to Inchcolm leaves at 9.40 from the east pier.\n\n" * 8
LARGE = b"".join(b"Lot %d was sold to bidder %d.\n\n" % (i, 7 * i) for i in range(260))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    with small_disk(tmp_path_factory.mktemp("small") / "disk") as disk:
        yield disk


@pytest.fixture(scope="module")
def server(disk: SmallDisk) -> Iterator[Server]:
    """Its snapshots take 3 KB a token, so that a document's snapshot dwarfs its text."""
    fake = {"fake_script": [97] * 400, "fake_step_s": 0.01, "fake_layers": 24}
    with Server(disk.path / "data", fake=fake, kv_type="fp16") as server:
        yield server


def left_of(server: Server) -> list[str]:
    """Files of documents, whole or not."""
    names = ("files", "store/snapshots", "store/building", "store/trash")
    return [f"{name}/{file}" for name in names for file in files_below(server.data_dir / name)]


def documents_of(server: Server) -> list[str]:
    return [document["id"] for document in server.get("/v1/documents").json()["data"]]


def remove(server: Server, document_id: str) -> None:
    """Two of the large one would not fit the disk."""
    assert server.request("DELETE", f"/v1/documents/{document_id}").status_code == 200


def expect_storage_problem(response) -> None:
    assert response.status_code == 507, response.text
    assert response.headers["content-type"].startswith("application/problem+json")
    assert response.json()["error"]["code"] == "storage_full"


def test_full_during_an_upload(server: Server, disk: SmallDisk):
    session_id = server.session(server.ready(SMALL)["id"])
    before, known = left_of(server), documents_of(server)
    disk.fill(server)
    for _ in range(2):
        expect_storage_problem(server.request("POST", "/v1/documents", files={"file": ("a.txt", LARGE * 40)}))
    assert left_of(server) == before
    assert documents_of(server) == known
    disk.free(server)
    remove(server, server.ready(LARGE)["id"])
    assert server.ask(session_id, max_tokens=3)["answer"] == "aaa"


def test_full_while_a_snapshot_is_written(server: Server, disk: SmallDisk):
    session_id = server.session(server.ready(SMALL)["id"])
    before = left_of(server)
    disk.fill(server, leave_nbytes=8 << 20)
    document = server.until_ended(server.upload(LARGE)["id"])
    assert (document["status"], document["error"]["code"]) == ("failed", "storage_full")
    assert document["snapshot"]["state"] == "absent"
    until(lambda: left_of(server) == before, "what was made of it is gone, which comes after it is said to have failed")
    assert server.ask(session_id, max_tokens=3)["answer"] == "aaa"
    disk.free(server)
    again = server.ready(LARGE)
    assert again["id"] != document["id"]
    assert server.ask(server.session(again["id"]), max_tokens=3)["answer"] == "aaa"
    remove(server, again["id"])


def test_full_when_a_question_is_asked(server: Server, disk: SmallDisk):
    session_id = server.session(server.ready(SMALL)["id"])
    first = server.ask(session_id, max_tokens=3)
    disk.fill(server)
    expect_storage_problem(server.question(session_id, max_tokens=3))
    disk.free(server)
    assert [turn["id"] for turn in server.turns(session_id)] == [first["id"]]
    assert server.ask(session_id, max_tokens=3)["answer"] == "aaa"


def test_full_while_a_question_is_answered(server: Server, disk: SmallDisk):
    session_id = server.session(server.ready(SMALL)["id"])
    first = server.ask(session_id, max_tokens=3)
    before = left_of(server)
    with server.streaming(session_id, max_tokens=300) as response:
        arriving = events_of(response)
        next(arriving)
        disk.fill(server)
        last = list(arriving)[-1]
    assert last.name == "error"
    assert (last.data["status"], last.data["error"]["code"]) == (507, "storage_full")
    until(lambda: left_of(server) == before, "what was made of the turn is gone")
    disk.free(server)
    assert server.ask(session_id, max_tokens=3)["answer"] == "aaa"
    statuses = [turn["status"] for turn in server.turns(session_id)]
    assert statuses == ["done", "failed", "done"]
    server.stop()
    server.start()
    follow_up = server.ask(session_id, max_tokens=3)
    assert (follow_up["answer"], follow_up["cache"]["miss_reason"]) == (first["answer"], None)
