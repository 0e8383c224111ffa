"""Documents and sessions shared with users, organizations and links; and no longer."""

import asyncio
import time

import httpx
import pytest

from service.core.key_ring import KeyRing
from service.engine.fake import FakeEngine

pytestmark = pytest.mark.anyio
TOKEN_S = 0.1


@pytest.fixture
async def world(client, person, made):
    """Ann has a document; Bob is of her organization, Eve of another one."""
    people = [await person(client.services), await person(client.services, "bob")]
    eve = await person(client.services, "eve", organization="others")
    client.headers = people[0].headers
    return World(client, *people, eve, document_id=(await made(client))["id"])


class World:
    def __init__(self, client, ann, bob, eve, document_id):
        self.client, self.ann, self.bob, self.eve, self.document_id = client, ann, bob, eve, document_id
        self.client.headers = {}

    async def call(self, who, method, path, **options):
        headers = getattr(who, "headers", who)
        return await self.client.request(method, f"/v1{path}", headers=headers, **options)

    async def share(self, **body):
        """Of the document, by its owner."""
        response = await self.call(self.ann, "POST", f"/documents/{self.document_id}/shares", json=body)
        assert response.status_code == 201, response.text
        return response.json()

    async def revoke(self, share):
        path = f"/documents/{self.document_id}/shares/{share['id']}"
        assert (await self.call(self.ann, "DELETE", path)).status_code == 204

    async def sees(self, who):
        return (await self.call(who, "GET", f"/documents/{self.document_id}")).status_code == 200

    async def session(self, who):
        return await self.call(who, "POST", "/sessions", json={"document_ids": [self.document_id]})

    async def ask(self, who, session_id):
        return await self.call(who, "POST", f"/sessions/{session_id}/questions", json={"question": "Who?"})


async def test_with_a_user_for_asking_and_no_longer(world, engine):
    assert not await world.sees(world.bob)
    share = await world.share(**{"with": "user", "user": "bob"})
    assert (share["name"], share["access"], share["token"]) == ("bob", "ask", None)
    shown = (await world.call(world.bob, "GET", f"/documents/{world.document_id}")).json()
    assert shown["access"] == "ask"
    assert not await world.sees(world.eve)
    listed = (await world.call(world.bob, "GET", "/documents?shared=true")).json()["data"]
    assert [each["id"] for each in listed] == [world.document_id]
    assert (await world.call(world.bob, "GET", "/documents")).json()["data"] == []
    session_id = (await world.session(world.bob)).json()["id"]
    answer = (await world.ask(world.bob, session_id)).json()
    assert answer["usage"]["reused_tokens"] == answer["usage"]["document_tokens"], "one snapshot for all"
    assert len(engine.built) == 1
    assert engine.answered[-1].document.owner_id == world.ann.user_id
    assert (await world.call(world.ann, "GET", f"/sessions/{session_id}")).status_code == 404, "what Bob asks is his"
    await world.revoke(share)
    assert not await world.sees(world.bob)
    events = f"/sessions/{session_id}/questions/{answer['id']}/events"
    for method, path in (("GET", ""), ("POST", "/fork"), ("DELETE", "")):
        assert (await world.call(world.bob, method, f"/sessions/{session_id}{path}")).status_code == 404
    assert (await world.call(world.bob, "GET", events)).status_code == 404
    assert (await world.ask(world.bob, session_id)).status_code == 404
    assert (await world.call(world.bob, "GET", "/sessions")).json()["data"] == []
    await world.share(**{"with": "user", "user": "bob"})
    assert (await world.ask(world.bob, session_id)).status_code == 200, "his session is there again"


async def test_for_reading_only(world):
    await world.share(**{"with": "organization", "access": "read"})
    assert await world.sees(world.bob)
    assert not await world.sees(world.eve)
    refused = await world.session(world.bob)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "shared_for_reading")
    assert (await world.call(world.bob, "GET", f"/documents/{world.document_id}/pages/1")).status_code == 200
    assert (await world.call(world.bob, "GET", f"/documents/{world.document_id}/file")).status_code == 200
    for method, path, body in (
        ("PATCH", "", {"title": "x"}), ("DELETE", "", None), ("POST", "/cancel", None), ("GET", "/shares", None),
    ):  # fmt: skip
        refused = await world.call(world.bob, method, f"/documents/{world.document_id}{path}", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_owner")


async def test_a_second_share_with_the_same_takes_the_place_of_the_first(world):
    await world.share(**{"with": "user", "user": "bob", "access": "read"})
    await world.share(**{"with": "user", "user": "bob", "ttl_s": 60})
    listed = (await world.call(world.ann, "GET", f"/documents/{world.document_id}/shares")).json()["data"]
    assert [(each["name"], each["access"]) for each in listed] == [("bob", "ask")]
    assert listed[0]["expires_at"]


async def test_whom_it_cannot_be_shared_with(world):
    for body, code in (
        ({"with": "user", "user": "eve"}, "no_such_user"), ({"with": "user", "user": "no one"}, "no_such_user"),
        ({"with": "user", "user": "ann"}, "invalid"), ({"with": "user"}, "invalid"), ({"with": "all"}, "invalid"),
        ({"with": "link", "user": "bob"}, "invalid"), ({"with": "link", "access": "all"}, "invalid"),
        ({"with": "link", "ttl_s": 0}, "invalid"),
    ):  # fmt: skip
        refused = await world.call(world.ann, "POST", f"/documents/{world.document_id}/shares", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, code), body


async def test_by_a_link_that_is_a_key_for_one_document(world, made):
    world.client.headers = world.ann.headers
    other = await made(world.client, b"Something else.")
    world.client.headers = {}
    link = await world.share(**{"with": "link"})
    guest = {"Authorization": f"Bearer {link['token']}"}
    assert await world.sees(guest)
    assert (await world.call(guest, "GET", f"/documents/{other['id']}")).status_code == 404
    session_id = (await world.session(guest)).json()["id"]
    assert (await world.ask(guest, session_id)).status_code == 200
    assert (await world.call(guest, "GET", "/sessions")).status_code == 403, "others have the link too"
    assert (await world.call(guest, "POST", "/documents", files={"file": ("a", b"x")})).status_code == 403
    assert (await world.call(world.bob, "GET", f"/sessions/{session_id}")).status_code == 404
    shown = (await world.call(world.ann, "GET", f"/documents/{world.document_id}/shares")).json()["data"]
    assert [each["token"] for each in shown] == [None]
    await world.revoke(link)
    assert (await world.call(guest, "GET", f"/documents/{world.document_id}")).status_code == 401
    async with world.client.services.db.reading() as uow:
        assert await uow.sessions.of_owner(link["id"]) == [], "what was asked through it is gone"
        assert await uow.shares.get(link["id"]) is None


async def test_a_shared_session_is_read_and_forked_and_nothing_is_computed(world, engine):
    before = (await world.session(world.ann)).json()["id"]
    session_id = (await world.call(world.ann, "POST", f"/sessions/{before}/fork")).json()["id"]
    first = (await world.ask(world.ann, session_id)).json()
    shares = f"/sessions/{session_id}/shares"
    share = (await world.call(world.ann, "POST", shares, json={"with": "user", "user": "bob"})).json()
    seen = (await world.call(world.bob, "GET", f"/sessions/{session_id}")).json()
    assert seen["turns"][0]["answer"]["answer"] == first["answer"]
    assert seen["forked_from"] is None, "that one is not shared"
    assert (await world.call(world.ann, "GET", f"/sessions/{session_id}")).json()["forked_from"] == before
    assert await world.sees(world.bob), "its document is shared with it"
    for path, ids in (("/sessions?shared=true", [session_id]), ("/sessions", [])):
        assert [each["id"] for each in (await world.call(world.bob, "GET", path)).json()["data"]] == ids
    refused = await world.ask(world.bob, session_id)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_owner")
    built, computed = len(engine.built), (await engine.stats()).prefilled_tokens_total
    fork = (await world.call(world.bob, "POST", f"/sessions/{session_id}/fork")).json()
    assert (await engine.stats()).prefilled_tokens_total == computed
    answer = (await world.ask(world.bob, fork["id"])).json()
    assert len(engine.built) == built
    assert [turn.kv_id for turn in engine.answered[-1].turns] == [first["id"]], "the turn's KV is the same"
    assert answer["usage"]["reused_tokens"] > answer["usage"]["document_tokens"]
    assert (await world.call(world.ann, "DELETE", f"{shares}/{share['id']}")).status_code == 204
    for id in (session_id, fork["id"]):
        assert (await world.call(world.bob, "GET", f"/sessions/{id}")).status_code == 404
    assert (await world.call(world.bob, "GET", "/sessions?shared=true")).json()["data"] == []
    assert not await world.sees(world.bob)


async def test_a_removed_session_takes_what_was_asked_through_its_links_with_it(world):
    session_id = (await world.session(world.ann)).json()["id"]
    link = (await world.call(world.ann, "POST", f"/sessions/{session_id}/shares", json={"with": "link"})).json()
    guest = {"Authorization": f"Bearer {link['token']}"}
    fork = (await world.call(guest, "POST", f"/sessions/{session_id}/fork")).json()
    assert (await world.ask(guest, fork["id"])).status_code == 200
    assert (await world.call(world.ann, "DELETE", f"/sessions/{session_id}")).status_code == 204
    assert (await world.call(guest, "GET", f"/sessions/{fork['id']}")).status_code == 401
    async with world.client.services.db.reading() as uow:
        assert await uow.sessions.of_owner(link["id"]) == []


async def test_only_the_owner_of_the_documents_shares_a_session(world):
    await world.share(**{"with": "user", "user": "bob"})
    session_id = (await world.session(world.bob)).json()["id"]
    refused = await world.call(world.bob, "POST", f"/sessions/{session_id}/shares", json={"with": "link"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_your_documents")


async def test_a_removed_document_takes_the_turns_of_others_with_it(open_client, person, made, store):
    async with open_client(store=store) as client:
        ann, bob = await person(client.services), await person(client.services, "bob")
        client.headers = ann.headers
        theirs = (await made(client))["id"]
        client.headers = bob.headers
        own = (await made(client, b"Bob has this one. " * 30))["id"]
        world = World(client, ann, bob, None, theirs)
        await world.share(**{"with": "user", "user": "bob"})
        body = {"document_ids": [theirs, own]}
        session_id = (await world.call(bob, "POST", "/sessions", json=body)).json()["id"]
        answer_id = (await world.ask(bob, session_id)).json()["id"]
        assert (await world.call(bob, "DELETE", f"/documents/{own}")).status_code == 200
        assert (ann.user_id, "turn", answer_id) in store.deleted, "it was with the first document, which is Ann's"
        assert (await world.call(bob, "GET", f"/sessions/{session_id}")).status_code == 404
        assert await world.sees(bob)


@pytest.mark.parametrize("revoked", ["share", "link", "key"])
def test_a_running_stream_ends_before_its_next_event(serve, revoked):
    engine = FakeEngine([f"piece {n} " for n in range(400)], token_delay_s=TOKEN_S, max_context=20_000)
    with serve(engine) as live:
        tokens = _two_people(live)
        ann = {"Authorization": f"Bearer {tokens['ann']}"}
        with live.client(headers=ann) as client:
            document_id = _ready(client)
            with_whom = {"with": "user", "user": "bob"} if revoked == "share" else {"with": "link"}
            share = client.post(f"/v1/documents/{document_id}/shares", json=with_whom).json()
            token = {"share": tokens["bob"], "link": share["token"], "key": tokens["ann"]}[revoked]
            with live.client(headers={"Authorization": f"Bearer {token}"}) as guest:
                session_id = guest.post("/v1/sessions", json={"document_ids": [document_id]}).json()["id"]
                body = {"question": "Who?", "stream": True}
                with guest.stream("POST", f"/v1/sessions/{session_id}/questions", json=body) as response:
                    lines = response.iter_lines()
                    for _ in range(3):
                        assert next(line for line in lines if line.startswith("event:")) == "event: token"
                    began = time.monotonic()
                    if revoked == "key":
                        _in_server(live, _revoke_key(live, tokens["ann"]))
                    else:
                        assert client.delete(f"/v1/documents/{document_id}/shares/{share['id']}").status_code == 204
                    took_s = time.monotonic() - began  # what is sent until then is sent in time
                    rest = [line for line in lines if line.startswith(("event:", "data:"))]
                assert rest[-2] == "event: error"
                assert '"status":404' in rest[-1]
                # A key is looked at once a second; what is shared, before every event: one may be on its way.
                late_s = 2.0 if revoked == "key" else 0.0
                assert sum(line == "event: token" for line in rest) <= 2 + (took_s + late_s) / TOKEN_S


def _two_people(live):
    async def make():
        ring = KeyRing(live.services.db, live.services.clock)
        options = {"organization": "acme", "scopes": ("manage",)}
        made = {name: (await ring.create(user=name, **options))[1] for name in ("ann", "bob")}
        live.services.keys.look_again()
        return made

    return _in_server(live, make())


async def _revoke_key(live, token):
    await KeyRing(live.services.db, live.services.clock).revoke(token.partition(".")[0])


def _in_server(live, step):
    return asyncio.run_coroutine_threadsafe(step, live.loop).result(60)


def _ready(client: httpx.Client) -> str:
    document_id = client.post("/v1/documents", files={"file": ("a.txt", b"The fee is 1,275 pounds. " * 20)}).json()[
        "id"
    ]
    deadline = time.monotonic() + 60
    while client.get(f"/v1/documents/{document_id}").json()["status"] != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return document_id
