"""Encrypted snapshots through a server, Redis and S3: nothing plain is stored, its key opens it, no other does."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cache_store.fingerprint import Fingerprint
from cache_store.keyring import KeyRing
from cache_store.reader import SnapshotReader
from cache_store.store import SnapshotStore
from service.cli import main
from tests.cache_store.tiers.servers import RedisServer, S3Server
from tests.e2e.builds import computed_until
from tests.e2e.server import Server, until

DOCUMENT = b"The ferry to Inchcolm leaves at 9.40 from the east pier, and not on Sundays.\n\n" * 60
EVERYWHERE = dict.fromkeys(("disk", "redis", "object"), "ready")
KEY, LATER, OTHER = (os.urandom(32) for _ in range(3))
PIECE_NBYTES, STEP_NBYTES = 24, 700


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text(KEY.hex())
    return path


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Server], redis: RedisServer, s3: S3Server, key_file: Path) -> Server:
    """Its answers follow from the stored bytes."""
    fake = {"fake_from_kv": True, "fake_layer_s": 0.04}
    return serve_all(fake=fake, engine="fake", redis_url=redis.url, object_url=s3.url, encryption_key_file=key_file)


def is_everywhere(server: Server, document_id: str) -> bool:
    places = server.document(document_id)["snapshot"]["tiers"]
    return {place["tier"]: place["state"] for place in places} == EVERYWHERE


def plain_pieces(store: Path) -> Iterator[bytes]:
    """Of every stored snapshot pieces of its tokens and its KV, as the key opens them."""
    for name in SnapshotStore(store, keys=KeyRing(KEY)).names():
        with SnapshotReader(store / "snapshots", name, keys=KeyRing(KEY)) as reader:
            yield reader.token_ids.tobytes()[:PIECE_NBYTES]
            for _, _, records, _ in reader.layers():
                data = bytes(records)
                yield from (data[at : at + PIECE_NBYTES] for at in range(0, len(data) - PIECE_NBYTES, STEP_NBYTES))


def in_redis(redis: RedisServer) -> bytes:
    client = redis.client()
    try:
        found = [client.hgetall(key) for key in client.scan_iter("preread:kv:*")]
    finally:
        client.close()
    return b"".join(value for fields in found for value in fields.values())


def everything_stored(server: Server, redis: RedisServer, s3: S3Server) -> dict[str, bytes]:
    """All bytes of each tier."""
    on_disk = b"".join(path.read_bytes() for path in server.store.rglob("*") if path.is_file())
    return {"disk": on_disk, "redis": in_redis(redis), "object": b"".join(map(s3.body, s3.names()))}


def seal_with_another_key(store: Path, document_id: str) -> None:
    """Put the very same snapshot in the place of a document's, but for its key."""
    (name,) = (name for name in SnapshotStore(store, keys=KeyRing(KEY)).names() if name.key.id == document_id)
    aside = SnapshotStore(store.with_name("aside"), keys=KeyRing(OTHER))
    with SnapshotReader(store / "snapshots", name, keys=KeyRing(KEY)) as reader:
        fingerprint, tokens = Fingerprint(**reader.manifest.fingerprint), reader.token_ids.tolist()
        with aside.begin(name.key, fingerprint, reader.layout, tokens) as builder:
            for records in reader.read_blocks(range(builder.n_blocks)):
                builder.append(records)
            builder.publish(canary=reader.canary)
    directory = store.joinpath("snapshots", *name.parts)
    shutil.rmtree(directory)
    shutil.move(store.with_name("aside").joinpath("snapshots", *name.parts), directory)


def listed(server: Server, key_file: Path, text: str) -> Result:
    """What `preread snapshots list` says with other keys in the file."""
    key_file.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        return CliRunner().invoke(main, ["snapshots", "list"])


def cut_while_it_is_read(server: Server) -> str:
    """A document, ready though the engine was killed in the middle of its prefill: what was done is not done again."""
    document_id = server.upload(DOCUMENT)["id"]
    computed_until(server, document_id, 0.45)
    (journal,) = (server.store / "building").glob("*.journal")
    assert b"token_tags" in journal.read_bytes()
    server.kill_engine()
    server.until_engine_is_back()
    document = server.until_ended(document_id)
    assert document["status"] == "ready", document
    assert document["snapshot"]["prefilled_tokens"] < 0.7 * document["token_count"]
    return document_id


def test_nothing_plain_is_stored_and_only_the_key_brings_it_back(
    server: Server, redis: RedisServer, s3: S3Server, key_file: Path
):
    document_id = cut_while_it_is_read(server)
    session_id = server.session(document_id)
    first = server.ask(session_id, max_tokens=8)
    until(lambda: is_everywhere(server, document_id), "everything is sent")
    until(lambda: sum(name.endswith("manifest.json") for name in s3.names()) == 2, "the turn is in S3")
    pieces = list(plain_pieces(server.store))
    assert len(pieces) > 300
    for tier, stored in everything_stored(server, redis, s3).items():
        assert len(stored) > 100_000, tier
        assert not [piece for piece in pieces if piece in stored], tier

    other_id = server.ready(DOCUMENT[:700], "other.txt")["id"]
    other = server.ask(server.session(other_id), max_tokens=8)
    server.stop()
    refused = listed(server, key_file, OTHER.hex())
    assert refused.exit_code == 1
    assert "are encrypted with the key" in refused.output
    assert "Give that key (PREREAD_ENCRYPTION_KEY_FILE" in refused.output
    seal_with_another_key(server.store, other_id)
    assert listed(server, key_file, f"{LATER.hex()}\n{KEY.hex()}\n").exit_code == 0
    for key in (KEY, LATER, OTHER):
        assert key.hex() not in refused.output + server.log_path.read_text()

    server.start()
    again = server.ask(server.session(document_id), max_tokens=8)
    assert (again["answer"], again["cache"]["source"], again["cache"]["miss_reason"]) == (first["answer"], "disk", None)
    assert server.engine_stat("document_prefill_tokens_total") == 0
    anew = server.ask(server.session(other_id), max_tokens=8)
    assert (anew["answer"], anew["cache"]["source"], anew["cache"]["miss_reason"]) == (other["answer"], "none", "key")
    assert server.engine_stat("document_prefill_tokens_total") == anew["usage"]["document_tokens"]
