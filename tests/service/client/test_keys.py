"""A server with keys: whose client sees what."""

import pytest

from service.client import Client, Forbidden, NotFound, RateLimited, Unauthenticated
from service.core.key_ring import KeyRing
from tests.service.client.conftest import TEXT


@pytest.fixture(scope="module")
def key(live):
    """Makes a key of a user."""

    async def make(user, scope):
        ring = KeyRing(live.services.db, live.services.clock)
        _, token = await ring.create(user=user, organization="acme", scopes=(scope,))
        live.services.keys.look_again()
        return token

    return lambda user, scope="manage": live.do(make(user, scope))


@pytest.fixture
def ann(live, key):
    with Client(live.url, key("ann"), timeout=60) as client:
        yield client


@pytest.fixture
def bob(live, key):
    with Client(live.url, key("bob"), timeout=60) as client:
        yield client


def test_without_a_key_or_its_scope_it_is_refused(live, key, ann):
    with Client(live.url) as nobody, pytest.raises(Unauthenticated) as refused:
        next(nobody.documents.list(), None)
    assert refused.value.code == "unauthenticated"
    with Client(live.url, key("ann", "read")) as reader, pytest.raises(Forbidden) as scope:
        reader.documents.upload(TEXT)
    assert scope.value.code == "scope_missing"


def test_what_is_shared_is_seen_until_it_is_not(live, ann, bob):
    document = ann.documents.wait(ann.documents.upload(TEXT, filename="a.txt").id)
    with pytest.raises(NotFound):
        bob.documents.get(document.id)
    share = ann.documents.shares.create(document.id, "user", user="bob")
    assert (share.kind, share.name, share.access, share.token) == ("user", "bob", "ask", None)
    assert bob.documents.get(document.id).access == "ask"
    assert [each.id for each in bob.documents.list(shared=True)] == [document.id]
    session = bob.sessions.create(document.id)
    assert bob.ask(session.id, "Who?").text
    ann.documents.shares.revoke(document.id, share.id)
    with pytest.raises(NotFound):
        bob.ask(session.id, "Who?")
    link = ann.documents.shares.create(document.id, "link", access="read", ttl_s=600)
    with Client(live.url, link.token) as anybody:
        assert anybody.documents.get(document.id).access == "read"
        with pytest.raises(Forbidden):
            anybody.sessions.create(document.id)
    assert [each.id for each in ann.documents.shares.list(document.id)] == [link.id]
    ann.documents.delete(document.id)


def test_a_session_is_shared_with_its_documents(ann, bob):
    document = ann.documents.wait(ann.documents.upload(TEXT * 2, filename="b.txt").id)
    session = ann.sessions.create(document.id)
    ann.ask(session.id, "Who?")
    share = ann.sessions.shares.create(session.id, "organization")
    assert [turn.question for turn in bob.sessions.fork(session.id).turns] == ["Who?"]
    assert [each.id for each in ann.sessions.shares.list(session.id)] == [share.id]
    ann.sessions.shares.revoke(session.id, share.id)
    with pytest.raises(NotFound):
        bob.sessions.get(session.id)
    ann.documents.delete(document.id)


def test_a_stream_that_is_revoked_ends(live, ann, bob):
    live.engine.token_delay_s = 0.01
    live.engine.reply = [f"{n} " for n in range(300)]
    document = ann.documents.wait(ann.documents.upload(TEXT * 3, filename="c.txt").id)
    share = ann.documents.shares.create(document.id, "user", user="bob")
    events = bob.stream(bob.sessions.create(document.id).id, "Count")
    next(events)
    ann.documents.shares.revoke(document.id, share.id)
    with pytest.raises(NotFound):
        list(events)
    ann.documents.delete(document.id)


def test_a_quota_is_told_with_when_to_come_back(live, ann):
    live.services.uploads._quotas = live.services.uploads._quotas.__class__(documents=1)
    document = ann.documents.upload(TEXT * 4, filename="d.txt")
    with pytest.raises(RateLimited) as full:
        ann.documents.upload(TEXT * 5, filename="e.txt")
    assert full.value.code == "quota_documents"
    assert full.value.retry_after_s == 3600
    ann.documents.delete(document.id)
