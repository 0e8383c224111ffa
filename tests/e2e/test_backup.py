"""The drill of docs/operations.md: the database, the uploaded files and the durable tier are copied, and restored in an
empty place. Every document answers, its session goes on, and nothing is computed again."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.e2e.server import Server, until

ANSWER = [*b"All is well.", 256]
DOCUMENTS = [b"".join(b"Lot %d went to bidder %d.\n\n" % (i, n * i) for i in range(40)) for n in (3, 5)]


def back_up(server: Server, backup: Path) -> None:
    """While the server runs."""
    backup.mkdir()
    source, target = (sqlite3.connect(path / "preread.sqlite3") for path in (server.data_dir, backup))
    with closing(source), closing(target):
        source.backup(target)
    shutil.copytree(server.data_dir / "files", backup / "files")


def test_backup_and_restore(serve, tmp_path: Path):
    objects, backup = tmp_path / "objects", tmp_path / "backup"
    fake = {"fake_script": ANSWER}
    server: Server = serve(fake=fake, object_url=f"file://{objects}")
    ids = [server.ready(document)["id"] for document in DOCUMENTS]
    sessions = [server.session(document_id) for document_id in ids]
    for session_id in sessions:
        server.ask(session_id)

    def all_sent() -> bool:
        tiers = [{place["tier"]: place["state"] for place in server.document(id)["snapshot"]["tiers"]} for id in ids]
        return all(of_one.get("object") == "ready" for of_one in tiers) and len(list(objects.glob("*/turns/*"))) == 2

    until(all_sent, "the snapshots are not in the object store")
    back_up(server, backup)
    server.stop()
    copied = tmp_path / "copied"
    shutil.copytree(objects, copied)
    shutil.rmtree(objects)
    shutil.rmtree(server.data_dir)

    restored = Server(tmp_path / "restored" / "data", fake=fake, object_url=f"file://{copied}")
    shutil.copytree(backup, restored.data_dir)
    with restored:
        for document_id, session_id, document in zip(ids, sessions, DOCUMENTS, strict=True):
            assert restored.get(f"/v1/documents/{document_id}/file").content == document
            answer = restored.ask(session_id, "And then?")
            assert answer["answer"] == "All is well."
            assert (answer["cache"]["source"], answer["cache"]["miss_reason"]) == ("object", None)
            assert len(restored.turns(session_id)) == 2
        assert restored.engine_stat("document_prefill_tokens_total") == 0
