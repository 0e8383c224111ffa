"""Users, keys, shares and records, the same in both databases."""

import pytest

from service.db.engine import Database
from service.db.errors import AlreadyExists
from service.db.migrations import upgrade
from service.db.models import DocumentRow, SessionDocumentRow, SessionRow
from service.db.people import AuditRow, KeyRow, OrganizationRow, RepeatRow, ShareRow, UserRow

pytestmark = pytest.mark.anyio
NOW = 1000.0


@pytest.fixture
async def db(database_url):
    """Ann, Bob and Eve; Ann has three documents, and a session over the third."""
    await upgrade(database_url)
    database = Database(database_url)
    async with database.writing() as uow:
        for organization, users in (("acme", ("ann", "bob")), ("others", ("eve",))):
            await uow.people.add(OrganizationRow(id=organization, name=organization, created_at=NOW))
            for user in users:
                await uow.people.add(UserRow(id=user, name=user, organization_id=organization, created_at=NOW))
        for n in (1, 2, 3):
            await uow.documents.add(document(f"doc_{n}"))
        its = [SessionDocumentRow(ordinal=0, document_id="doc_3")]
        times = {"created_at": NOW, "updated_at": NOW}
        await uow.sessions.add(SessionRow(id="ses", owner_id="ann", document_id="doc_3", documents=its, **times))
    yield database
    await database.close()


def document(id):
    return DocumentRow(
        id=id, owner_id="ann", dedupe_key=id, title=id, filename=id, nbytes=5, sha256="0", created_at=NOW,
        updated_at=NOW,
    )  # fmt: skip


def share(id, subject, access="ask", expires_at=None, kind="user", **target):
    return ShareRow(
        id=id, kind=kind, subject=subject, access=access, created_by="ann", created_at=NOW, expires_at=expires_at,
        **target,
    )  # fmt: skip


async def test_who_may_see_what(db):
    async with db.writing() as uow:
        await uow.shares.add(share("1", "bob", "read", document_id="doc_1"))
        await uow.shares.add(share("2", "acme", kind="organization", document_id="doc_1"))
        await uow.shares.add(share("3", "eve", document_id="doc_2", expires_at=NOW + 1))
        await uow.shares.add(share("4", "eve", "read", session_id="ses"))
        await uow.shares.add(share("5", "5", kind="link", document_id="doc_2"))
    with pytest.raises(AlreadyExists):
        async with db.writing() as uow:
            await uow.shares.add(share("6", "bob", document_id="doc_1"))

    async def seen(who, now=NOW):
        async with db.reading() as uow:
            access = {f"doc_{n}": await uow.shares.document_access(who, f"doc_{n}", now) for n in (1, 2, 3)}
            access["ses"] = await uow.shares.session_access(who, "ses", now)
            listed = await uow.documents.page(who, limit=9, after=None, shared_at=now)
            assert {row.id for row in listed} == ({id for id, level in access.items() if level} - {"ses"})
        return {id: level for id, level in access.items() if level}

    assert await seen("bob") == {"doc_1": "ask"}, "the larger of two"
    assert await seen("eve") == {"doc_2": "ask", "doc_3": "read", "ses": "read"}
    assert await seen("eve", NOW + 1) == {"doc_3": "read", "ses": "read"}
    assert await seen("5") == {"doc_2": "ask"}, "a link sees what it is for"
    async with db.writing() as uow:
        await uow.documents.remove("doc_3")
        await uow.shares.remove("3")
    assert await seen("eve") == {}


async def test_what_is_for_the_user_local_is_not_for_the_organization_of_this_name(db):
    async with db.writing() as uow:
        await uow.people.add(UserRow(id="cat", name="cat", organization_id="local", created_at=NOW))
        await uow.shares.add(share("1", "local", document_id="doc_1"))
        await uow.shares.add(share("2", "local", kind="organization", document_id="doc_2"))
    async with db.reading() as uow:
        for who, its in (("local", ["doc_1", "doc_2"]), ("cat", ["doc_2"]), ("bob", [])):
            levels = [await uow.shares.document_access(who, f"doc_{n}", NOW) for n in (1, 2, 3)]
            assert levels == ["ask" if f"doc_{n}" in its else None for n in (1, 2, 3)], who
            listed = await uow.documents.page(who, limit=9, after=None, shared_at=NOW)
            assert sorted(row.id for row in listed) == its


async def test_the_user_and_the_organization_local_have_a_share_each(db):
    async with db.writing() as uow:
        await uow.shares.add(share("1", "local", document_id="doc_1", access="read"))
        await uow.shares.add(share("2", "local", kind="organization", document_id="doc_1"))
    async with db.reading() as uow:
        assert [row.id for row in await uow.shares.of_document("doc_1")] == ["1", "2"]
        assert await uow.shares.document_accesses("local", ["doc_1", "doc_2"], NOW) == {"doc_1": "ask"}


async def test_sessions_over_what_is_not_shared_any_more_are_not_listed(db):
    async with db.writing() as uow:
        await uow.shares.add(share("1", "bob", document_id="doc_1"))
        its = [SessionDocumentRow(ordinal=n, document_id=f"doc_{n + 1}") for n in (0, 1)]
        times = {"created_at": NOW, "updated_at": NOW}
        await uow.sessions.add(SessionRow(id="his", owner_id="bob", document_id="doc_1", documents=its, **times))

    async def listed():
        async with db.reading() as uow:
            return [row.id for row in await uow.sessions.page("bob", limit=9, after=None, now=NOW)]

    assert await listed() == [], "one of its documents is not"
    async with db.writing() as uow:
        await uow.shares.add(share("2", "acme", kind="organization", document_id="doc_2"))
    assert await listed() == ["his"]
    async with db.reading() as uow:
        assert await uow.sessions.of_owner("bob") == ["his"]


async def test_keys(db):
    async with db.writing() as uow:
        assert not await uow.people.is_any_key()
        for id, origin in (("key_1", "command"), ("key_2", "settings"), ("key_3", "settings")):
            await uow.people.add(
                KeyRow(id=id, user_id="ann", digest="0", scopes=["read"], origin=origin, created_at=NOW)
            )
        await uow.people.revoke_settings(NOW, but="key_3")
        await uow.people.used({"key_1": NOW + 5})
        assert (await uow.people.revoke("key_3", NOW), await uow.people.revoke("key_3", NOW)) == (True, False)
    async with db.reading() as uow:
        found = {key.id: (key.revoked_at, key.last_used_at, user, of) for key, user, of in await uow.people.keys()}
        assert await uow.people.is_any_key()
        assert await uow.people.names(["bob", "acme", "nobody"]) == {"bob": "bob", "acme": "acme"}
    assert found == {
        "key_1": (None, NOW + 5, "ann", "acme"),
        "key_2": (NOW, None, "ann", "acme"),
        "key_3": (NOW, None, "ann", "acme"),
    }


async def test_records(db):
    async with db.writing() as uow:
        for day, tokens in ((1, 5), (1, 7), (2, 0), (2, 3)):
            await uow.records.add_tokens("ann", day, tokens)
        for n in (1, 2):
            await uow.records.add(AuditRow(id=f"e{n}", at=NOW + n, user_id="ann", action="ask", target=f"t{n}"))
        await uow.records.add(RepeatRow(owner_id="ann", key="k", fingerprint="f", target="t", created_at=NOW))
        assert await uow.documents.held_by_owner("ann") == (3, 15)
        assert await uow.turns.running_for("ann") == 0
    async with db.writing() as uow:
        assert [await uow.records.tokens("ann", day) for day in (1, 2, 3)] == [12, 3, 0]
        assert [row.id for row in await uow.records.audited(limit=9)] == ["e2", "e1"]
        assert [row.id for row in await uow.records.audited(limit=9, target="t1", user_id="ann")] == ["e1"]
        await uow.records.forget(audit_before=NOW + 2, repeats_before=NOW + 1, usage_before=2)
    async with db.reading() as uow:
        assert [await uow.records.tokens("ann", day) for day in (1, 2)] == [0, 3]
        assert [row.id for row in await uow.records.audited(limit=9)] == ["e2"]
        assert await uow.records.repeated("ann", "k") is None
