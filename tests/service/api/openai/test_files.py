"""Files and uploads in parts, by the `openai` package as it is."""

import hashlib

import openai
import pytest

from tests.service.api.openai.conftest import TEXT


@pytest.fixture(scope="module")
def client(world):
    return world.client()


def test_the_life_of_a_file(world, client):
    file = client.files.create(
        file=("life.txt", TEXT.encode()), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.object, file.filename, file.bytes, file.purpose) == ("file", "life.txt", len(TEXT), "user_data")
    assert file.expires_at - file.created_at == 3600
    world.until(lambda: client.files.retrieve(file.id).status == "processed")
    assert client.files.content(file.id).read() == TEXT.encode()
    assert client.files.wait_for_processing(file.id).id == file.id
    with world.http() as http:
        document = http.get(f"/v1/documents/{file.id.replace('file-', 'doc_')}").json()
    assert (document["filename"], document["status"]) == ("life.txt", "ready")
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (file.id, True, "file")
    with pytest.raises(openai.NotFoundError) as gone:
        client.files.retrieve(file.id)
    assert gone.value.code == "not_found"


def test_the_list_is_paged_both_ways(client):
    made = [client.files.create(file=(f"{n}.txt", f"{n} {TEXT}".encode()), purpose="assistants").id for n in range(3)]
    newest = [file.id for file in client.files.list(purpose="assistants", limit=2)]
    assert newest == made[::-1], "the package turns the pages"
    assert [file.id for file in client.files.list(purpose="assistants", order="asc", limit=1)] == made
    assert [file.id for file in client.files.list(purpose="user_data") if file.id in made] == []
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.list(after="file-00000000000000000000000000")
    assert refused.value.param == "after"


def test_what_is_no_document_is_refused(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    assert refused.value.param == "purpose"
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("a.png", b"\x89PNG\r\n\x1a\n" + bytes(100)), purpose="user_data")
    assert refused.value.param == "file"
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("empty.txt", b""), purpose="user_data")


def begun(client, nbytes: int, name: str = "parts.txt"):
    return client.uploads.create(bytes=nbytes, filename=name, mime_type="text/plain", purpose="user_data")


def test_an_upload_in_parts(world, client):
    whole = f"In parts. {TEXT}".encode()
    upload = begun(client, len(whole))
    assert (upload.object, upload.status, upload.bytes) == ("upload", "pending", len(whole))
    second = client.uploads.parts.create(upload.id, data=whole[100:])
    first = client.uploads.parts.create(upload.id, data=whole[:100])
    assert (first.object, first.upload_id) == ("upload.part", upload.id)
    digest = hashlib.md5(whole, usedforsecurity=False).hexdigest()
    done = client.uploads.complete(upload.id, part_ids=[first.id, second.id], md5=digest)
    assert (done.status, done.file.filename) == ("completed", "parts.txt")
    assert client.files.content(done.file.id).read() == whole
    assert not list((world.services.settings.data_dir / "uploads").iterdir())
    with pytest.raises(openai.ConflictError) as over:
        client.uploads.cancel(upload.id)
    assert over.value.code == "upload_not_pending"


def test_the_package_can_cut_a_file_itself(client, tmp_path):
    path = tmp_path / "cut.txt"
    path.write_text("Cut. " + TEXT * 20, encoding="utf-8")
    done = client.uploads.upload_file_chunked(file=path, mime_type="text/plain", purpose="user_data", part_size=1000)
    assert done.status == "completed"
    assert done.file.bytes == path.stat().st_size


def test_parts_that_do_not_fit_are_refused_and_nothing_is_left(world, client):
    upload = begun(client, 10)
    with pytest.raises(openai.APIStatusError) as refused:
        client.uploads.parts.create(upload.id, data=b"x" * 11)
    assert refused.value.status_code == 413
    part = client.uploads.parts.create(upload.id, data=b"x" * 4)
    for part_ids in ([part.id], [part.id, part.id], ["part_none"]):
        with pytest.raises(openai.BadRequestError) as refused:
            client.uploads.complete(upload.id, part_ids=part_ids)
        assert refused.value.param == "part_ids"
    assert client.uploads.cancel(upload.id).status == "cancelled"
    assert not list((world.services.settings.data_dir / "uploads").iterdir())
    with pytest.raises(openai.ConflictError):
        client.uploads.parts.create(upload.id, data=b"x")
    with pytest.raises(openai.BadRequestError):
        begun(client, 0)
    with pytest.raises(openai.APIStatusError) as refused:
        begun(client, 1 << 40)
    assert refused.value.status_code == 413


def test_uploads_whose_time_is_over_leave_nothing(world, client):
    upload = begun(client, 10)
    client.uploads.parts.create(upload.id, data=b"x" * 4)
    folder = world.services.settings.data_dir / "uploads" / upload.id
    assert folder.is_dir()

    async def expire() -> None:
        async with world.services.db.writing() as uow:
            (await uow.chats.upload("local", upload.id)).expires_at = 0.0
        await world.services.chats.parts.clean()

    world.call(expire())
    assert not folder.exists()
