"""Documents with an old snapshot: counted, marked, and read again in the background in order of use."""

import asyncio
import json
from dataclasses import replace

import msgspec
import pytest
from click.testing import CliRunner

from cache_store.keys import SnapshotKey
from cache_store.store import SnapshotStore
from service.cli import main
from service.core.rebuilding import Rebuilder, _fresh, plan_rebuild
from service.engine.fake import FAKE_FINGERPRINT
from service.engine.messages import Failed
from service.engine.models.card import expected_fields
from tests.cache_store.recipes import FINGERPRINT, Recipe

pytestmark = pytest.mark.anyio
NEW = replace(FAKE_FINGERPRINT, weights="another")


@pytest.fixture
async def client(anyio_backend, open_client):
    async with open_client() as client:
        yield client


@pytest.fixture
async def documents(client, made):
    """Three documents; the first was asked about last, then the third."""
    ids = [(await made(client, f"The keeper of light {n} is Marta. ".encode() * 20))["id"] for n in range(3)]
    for document_id in (ids[2], ids[0]):
        session = (await client.post("/v1/sessions", json={"document_ids": [document_id]})).json()["id"]
        assert (await client.post(f"/v1/sessions/{session}/questions", json={"question": "Who?"})).status_code == 200
    return ids


def serve(settings, engine, fingerprint) -> SnapshotStore:
    """As if an engine of that fingerprint had been started."""
    engine._info = msgspec.structs.replace(engine.info, fingerprint_digest=fingerprint.digest)
    engine.snapshots.clear()
    store = SnapshotStore(settings.store_dir)
    store.serve(fingerprint)
    return store


async def states(client, ids):
    return [(await client.get(f"/v1/documents/{id}")).json()["snapshot"]["state"] for id in ids]


async def until_states(client, ids, check):
    async with asyncio.timeout(60):
        while not check(await states(client, ids)):  # noqa: ASYNC110 - what is asked is the API
            await asyncio.sleep(0.02)


def rebuilder(client, engine):
    services = client.services
    return Rebuilder(services.db, engine, services.snapshots, 3600)


async def test_nothing_to_do_without_a_change(settings, client, documents, engine):
    serve(settings, engine, FAKE_FINGERPRINT)
    plan = await plan_rebuild(settings, dry_run=False)
    assert (plan.documents, plan.n_marked) == ([], 0)
    assert not await rebuilder(client, engine).rebuild_one()


async def test_they_are_read_again_in_order_of_use(settings, client, documents, engine):
    store = serve(settings, engine, NEW)
    store.speeds.record_prefill(1000, 10.0)
    order = [documents[0], documents[2], documents[1]]
    plan = await plan_rebuild(settings, dry_run=True)
    assert [document.id for document in plan.documents] == order
    assert plan.hours == pytest.approx(plan.n_tokens / 100 / 3600)
    assert plan.n_tokens == sum(document.n_tokens for document in plan.documents) > 1500
    assert await states(client, documents) == ["ready"] * 3
    assert (await plan_rebuild(settings, dry_run=False)).n_marked == 3
    assert await states(client, documents) == ["stale"] * 3

    # One that is asked about before its turn is read at once.
    session = (await client.post("/v1/sessions", json={"document_ids": [documents[1]]})).json()["id"]
    answer = (await client.post(f"/v1/sessions/{session}/questions", json={"question": "Who?"})).json()
    assert (answer["answer"], answer["cache"]["miss_reason"]) == ("The answer is 42.", "absent")
    assert await states(client, documents) == ["stale", "ready", "stale"]
    engine.built.clear()
    while await rebuilder(client, engine).rebuild_one():
        pass
    assert [request.document.document_id for request in engine.built] == order[:2]
    assert await states(client, documents) == ["ready"] * 3
    assert (await plan_rebuild(settings, dry_run=False)).documents == []


async def test_it_goes_on_in_the_background_and_after_a_cut(settings, open_client, made, engine):
    async with open_client() as client:
        ids = [(await made(client, f"Light {n}. ".encode() * 40))["id"] for n in range(2)]
    serve(settings, engine, NEW)
    assert (await plan_rebuild(settings, dry_run=False)).n_marked == 2
    engine.chunk_delay_s = 60
    async with open_client() as client:
        await until_states(client, ids, lambda found: "rebuilding" in found)
    engine.chunk_delay_s = 0
    async with open_client() as client:
        await until_states(client, ids, lambda found: found == ["ready", "ready"])


async def test_one_that_fails_is_left_to_its_question(settings, client, documents, engine, monkeypatch):
    monkeypatch.setattr("service.core.rebuilding._PAUSE_S", 0.0)
    serve(settings, engine, NEW)
    await plan_rebuild(settings, dry_run=False)
    engine.fail_next("build", Failed("storage", "full"))
    worker = rebuilder(client, engine)
    while await worker.rebuild_one():
        pass
    assert await states(client, documents) == ["absent", "ready", "ready"]


async def test_two_processes_do_not_take_the_same_one(settings, client, documents, engine):
    serve(settings, engine, NEW)
    await plan_rebuild(settings, dry_run=False)
    async with client.services.db.writing() as uow:
        assert [await uow.rebuilds.claim(documents[0]) for _ in range(2)] == [True, False]


async def test_the_command(settings, client, documents, engine, monkeypatch):
    serve(settings, engine, NEW)
    environment = {"PREREAD_DATA_DIR": str(settings.data_dir), "PREREAD_ENGINE": "fake"}

    def run(*arguments):
        return CliRunner().invoke(main, ["snapshots", "rebuild", *arguments], env=environment)

    said = await asyncio.to_thread(run, "--dry-run")
    assert said.stdout.count(" tokens\n") == 3
    assert "3 documents" in said.stderr
    assert "not known before a document was read" in said.stderr
    SnapshotStore(settings.store_dir).speeds.record_prefill(1000, 10.0)
    shown = json.loads((await asyncio.to_thread(run, "--json")).stdout)
    assert (len(shown["documents"]), shown["marked"], shown["tokens_per_s"]) == (3, 3, 100.0)
    assert await states(client, documents) == ["stale"] * 3
    assert "minutes at 100 tokens/s" in (await asyncio.to_thread(run, "--dry-run")).stderr


async def test_the_settings_may_be_ahead_of_the_engine(settings, monkeypatch, tmp_path):
    """Before the server is started with another KV type or model, what that needs can be told; and what going back to
    an earlier one does not."""
    store = SnapshotStore(settings.store_dir)
    old, other = FINGERPRINT, replace(FINGERPRINT, kv="k4v4/1")
    for fingerprint, name in ((old, "a"), (other, "b")):
        Recipe(key=SnapshotKey("alice", "document", name), fingerprint=fingerprint).build(store)
    real = settings.model_copy(update={"engine": "torch"})
    expected = {"weights": "w1", "kv": FINGERPRINT.kv}
    monkeypatch.setattr("service.core.rebuilding.expected_fields", lambda *_: expected)
    digests = {old.digest, other.digest, "0" * 16}
    assert _fresh(store, real, digests) == {old.digest}
    store.serve(old)
    assert _fresh(store, real, digests) == {old.digest}
    store.serve(other)
    assert _fresh(store, real, digests) == {old.digest}
    expected["kv"] = "k8v8/1"
    assert _fresh(store, real, digests) == set()


@pytest.mark.model
async def test_what_the_settings_say_of_a_fingerprint(demo_model):
    fields = expected_fields(demo_model, "k4v4")
    assert set(fields) == {"weights", "quantization", "tokenizer", "template", "rope", "kv"}
    assert fields["kv"].startswith("k4v4/")
