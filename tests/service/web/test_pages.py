"""The page without a browser: what is sent with it, who may see it, and that text stays text."""

import json
import re
from pathlib import Path

import pytest

from service.api import browsers
from service.errors import Unauthenticated
from service.web import assets, catalogue, frame, library
from service.web.rendering import own_path

WEB = Path(catalogue.__file__).parent
HTML = {"Accept": "text/html"}
EVIL = '"><img src=x onerror=alert(1)>'

pytestmark = pytest.mark.anyio


@pytest.fixture
async def signed_in(client, person):
    """A client whose only credential is the cookie of Ann."""
    ann = await person(client.services)
    token = ann.headers["Authorization"].split()[1]
    response = await client.post(
        "/app/sign-in", data={"key": token, "next": "/"}, headers={"Origin": "http://localhost"}
    )
    assert (response.status_code, response.headers["location"]) == (303, "/")
    client.sign_in = response
    client.token = token
    return client


def own(**headers):
    return {"Origin": "http://localhost", **headers}


async def test_every_page_is_sent_with_a_strict_policy(client):
    for path in ("/", "/app/documents/doc_none", "/app/static/app.js", "/app/link"):
        response = await client.get(path, headers=HTML)
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "same-origin"


async def test_the_api_is_as_before(client):
    assert "content-security-policy" not in (await client.get("/v1/documents")).headers
    paths = (await client.get("/schema/openapi.json")).json()["paths"]
    assert not [path for path in paths if path == "/" or path.startswith("/app")]


async def test_nobody_signs_in_where_there_are_no_keys(client):
    assert (await client.get("/", headers=HTML)).status_code == 200
    assert "Sign out" not in (await client.get("/", headers=HTML)).text
    assert (await client.get("/app/sign-in")).headers["location"] == "/"


async def test_who_is_not_signed_in_is_led_to_the_form_and_back(client, person):
    await person(client.services)
    led = await client.get("/app/documents/doc_1", headers=HTML)
    assert (led.status_code, led.headers["location"]) == (303, "/app/sign-in?next=/app/documents/doc_1")
    assert led.content == b""
    part = await client.get("/app/documents", headers={**HTML, "HX-Request": "true"})
    assert part.status_code == 401
    assert 'value="/app/documents/doc_1"' in (await client.get(led.headers["location"])).text
    led = await client.get("/app/ask?document=doc_1&document=doc_2", headers=HTML)
    form = (await client.get(led.headers["location"])).text
    assert 'name="next" value="/app/ask?document=doc_1&amp;document=doc_2"' in form


async def test_a_page_says_whether_its_document_was_read(open_client, reader, upload, until):
    reader.gate.clear()
    async with open_client(read=reader) as client:
        document_id = (await upload(client)).json()["id"]
        page = (await client.get(f"/app/documents/{document_id}", headers=HTML)).text
        assert "It is being read" in page
        assert "was read already" not in page
        reader.gate.set()
        await until(client, document_id)
        page = (await client.get(f"/app/documents/{document_id}", headers=HTML)).text
        assert "was read already" in page


async def test_the_switches_lead_back_to_where_one_is(client, made):
    first = (await made(client))["id"]
    second = (await made(client, data=b"The keeper of the light is Marta. " * 9))["id"]
    path = f"/app/ask?document={first}&document={second}"
    page = (await client.get(path, headers=HTML)).text
    assert page.count(f'name="next" value="{path.replace("&", "&amp;")}"') == 2
    assert f'href="{path.replace("&", "&amp;")}"' in page, "a new conversation is about the same documents"


async def test_which_documents_are_asked_about_is_kept_on_the_way_through_the_form_and_the_switches(client, person):
    await person(client.services)
    asked = "/app/ask?document=doc_1&document=doc_2"
    led = await client.get(asked, headers=HTML)
    assert led.headers["location"] == "/app/sign-in?next=/app/ask%3Fdocument%3Ddoc_1%26document%3Ddoc_2"
    form = (await client.get(led.headers["location"])).text
    assert f'value="{asked.replace("&", "&amp;")}"' in form
    assert f'value="{led.headers["location"]}"' in form, "the switches lead to the form with all of it"


async def test_the_cookie_stands_for_the_key_and_holds_nothing_of_it(signed_in):
    cookie = signed_in.sign_in.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert "Path=/;" in cookie
    for part in signed_in.token.split("."):
        assert part not in cookie
    assert (await signed_in.get("/v1/documents")).status_code == 200
    assert "ann" in (await signed_in.get("/")).text


async def test_odd_cookies_of_others_and_a_password_for_a_proxy_are_no_hindrance(signed_in):
    cookie = signed_in.cookies["preread_session"]
    signed_in.cookies.clear()
    headers = {"Cookie": f'odd={{"a": [1]}}; ;=x; preread_session={cookie}', "Authorization": "Basic eDp5"}
    assert (await signed_in.get("/v1/documents", headers=headers)).status_code == 200


async def test_a_redirect_may_have_any_letters(client):
    sent = await client.post("/app/preferences", data={"next": "/app/文档?x=1"}, headers=own())
    assert sent.headers["location"] == "/app/%E6%96%87%E6%A1%A3?x=1"


async def test_over_https_the_cookie_is_for_https_only(client, person):
    ann = await person(client.services)
    key = ann.headers["Authorization"].split()[1]
    headers = {"Origin": "https://localhost", "Host": "localhost"}
    response = await client.post("/app/sign-in", data={"key": key}, headers=headers)
    cookie = response.headers["set-cookie"]
    assert cookie.startswith("__Host-preread_session=web_")
    assert "Secure" in cookie
    assert "Path=/;" in cookie
    assert "domain" not in cookie.lower()


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({"cookie": "preread_session=a", "host": "docs.example.org", "sec-fetch-site": "same-origin"}, None),
        ({"cookie": "preread_session=a", "host": "docs.example.org", "origin": "https://docs.example.org"}, None),
        ({"cookie": "preread_session=a", "host": "docs.example.org"}, "a"),
        ({"cookie": "preread_session=a", "host": "localhost:8000", "sec-fetch-site": "same-origin"}, "a"),
        ({"cookie": "preread_session=a; __Host-preread_session=b", "host": "localhost"}, "b"),
        ({"cookie": "__Host-preread_session=b", "host": "docs.example.org", "sec-fetch-site": "none"}, "b"),
    ],
)
def test_a_cookie_that_another_name_of_the_domain_may_have_set_signs_nobody_in(headers, found):
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert browsers.session_of({"scheme": "http", "headers": raw}) == found
    assert browsers.session_of({"scheme": "https", "headers": raw}) == (
        found if "__Host-" in headers["cookie"] else None
    )


async def test_both_cookies_are_over_after_signing_out(signed_in):
    value = signed_in.cookies["preread_session"]
    signed_in.cookies.clear()
    headers = own(Cookie=f"__Host-preread_session={value}")
    assert (await signed_in.get("/v1/documents", headers=headers)).status_code == 200
    ended = (await signed_in.post("/app/sign-out", headers=headers)).headers.get_list("set-cookie")
    assert sorted(each.partition("=")[0] for each in ended) == ["__Host-preread_session", "preread_session"]
    assert all("max-age=0" in each.lower() and ("Secure" in each) == each.startswith("__Host") for each in ended)
    assert (await signed_in.get("/v1/documents", headers=headers)).status_code == 401


@pytest.mark.parametrize("headers", [{}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
async def test_the_cookie_alone_changes_nothing(signed_in, headers):
    for path in ("/v1/documents", "/app/sign-out", "/app/documents/doc_1/delete"):
        refused = await signed_in.post(path, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")


async def test_a_key_that_is_for_nothing_here_can_sign_out(client, person):
    prometheus = await person(client.services, "prometheus", scopes=("metrics",))
    key = prometheus.headers["Authorization"].split()[1]
    await client.post("/app/sign-in", data={"key": key}, headers=own())
    page = await client.get("/", headers=HTML)
    assert page.status_code == 403
    assert "Your key is not for this." in page.text
    assert "Sign out" in page.text
    assert (await client.post("/app/sign-out", headers=own())).status_code == 303


async def test_who_signs_out_is_out_everywhere(signed_in):
    cookie = signed_in.cookies["preread_session"]
    response = await signed_in.post("/app/sign-out", headers=own())
    assert response.headers["location"] == "/app/sign-in"
    with pytest.raises(Unauthenticated):
        await signed_in.services.web_sessions.principal(cookie)


async def test_signing_out_when_it_is_over_already_is_no_error(signed_in):
    signed_in.cookies.clear()
    response = await signed_in.post("/app/sign-out", headers=own(Cookie="preread_session=web_none.none"))
    assert (response.status_code, response.headers["location"]) == (303, "/app/sign-in")
    assert response.content == b""


async def test_a_form_of_more_fields_than_any_is_refused(client):
    response = await client.post("/app/preferences", content=b"a=b&" * 200, headers=own())
    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid")


@pytest.mark.parametrize("form", ["{}", "W/{}", '"other", W/{}'])
async def test_static_files_are_sent_again_only_when_they_changed(client, form):
    etag = (await client.get("/app/static/app.js")).headers["etag"]
    again = await client.get("/app/static/app.js", headers={"If-None-Match": form.format(etag)})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert again.headers["cache-control"] == "no-cache"
    assert (await client.get("/app/static/app.js", headers={"If-None-Match": '"other"'})).status_code == 200


async def test_a_revoked_key_ends_what_signed_in_with_it(signed_in):
    from service.core.key_ring import KeyRing

    ring = KeyRing(signed_in.services.db, signed_in.services.clock)
    await ring.revoke((await ring.all())[0].row.id)
    assert (await signed_in.get("/v1/documents")).status_code == 401


async def test_a_sign_in_ends_by_itself(open_client, person, clock):
    async with open_client(clock=clock) as client:
        key = (await person(client.services)).headers["Authorization"].split()[1]
        await client.post("/app/sign-in", data={"key": key}, headers=own())
        clock.advance(7 * 24 * 3600 - 1)
        assert (await client.get("/app/session")).status_code == 204
        clock.advance(2)
        assert (await client.get("/app/session")).status_code == 401


@pytest.mark.parametrize("key", ["", "nonsense", "key_01m8aaaaaaaa." + "a" * 43, "shr_01m8aaaaaaaa." + "a" * 43])
async def test_a_wrong_key_is_told_with_what_to_do(client, person, key):
    await person(client.services)
    response = await client.post("/app/sign-in", data={"key": key}, headers=own())
    assert response.status_code == 401
    assert 'role="alert"' in response.text
    assert "set-cookie" not in response.headers


async def test_titles_are_only_ever_text(client, made):
    document = await made(client, name=f"{EVIL}.txt", title=EVIL)
    session = await client.post("/v1/sessions", json={"document_ids": [document["id"]], "title": EVIL})
    dialogs = [f"/app/documents/{document['id']}/{name}" for name in ("edit", "share", "delete")]
    for path in ("/", f"/app/documents/{document['id']}", f"/app/sessions/{session.json()['id']}", *dialogs):
        text = (await client.get(path, headers=HTML)).text
        assert "<img" not in text, path
        assert "&lt;img" in text, path


async def test_rows_and_dialogs_do_what_they_say(client, made):
    document_id = (await made(client))["id"]
    pinned = await client.post(f"/app/documents/{document_id}/pin", data={"pinned": "true"})
    assert 'aria-pressed="true"' in pinned.text
    edited = await client.post(f"/app/documents/{document_id}/edit", data={"title": "Renamed", "keep": "7d"})
    assert edited.headers["hx-trigger"] == "documents-changed"
    body = (await client.get(f"/v1/documents/{document_id}")).json()
    assert (body["title"], body["pinned"], body["expires_at"] is not None) == ("Renamed", True, True)
    receipt = await client.post(f"/app/documents/{document_id}/delete")
    assert "Uploaded file" in receipt.text
    assert (await client.get(f"/v1/documents/{document_id}")).status_code == 404


async def test_a_link_opens_one_thing_and_signs_nobody_out(signed_in, until):
    key = {"Authorization": f"Bearer {signed_in.token}"}
    files = {"file": ("notes.txt", b"The keeper is Marta Kovalenko. " * 20)}
    document_id = (await signed_in.post("/v1/documents", files=files, headers=key)).json()["id"]
    await until(signed_in, document_id)
    wanted = {"with": "link", "access": "read"}
    share = await signed_in.post(f"/app/documents/{document_id}/share", data=wanted, headers=own())
    token = re.search(r"/app/link#([^\"]+)", share.text)[1]
    opened = await signed_in.post("/app/link", data={"token": token}, headers=own())
    path = opened.json()["path"]
    assert path == f"/link/{token.split('.')[0]}/"
    assert f"Path={path}" in opened.headers["set-cookie"]
    assert (await signed_in.get(path)).headers["location"] == f"{path}app/documents/{document_id}"
    page = await signed_in.get(f"{path}app/documents/{document_id}")
    assert "shared with you for reading" in page.text
    assert (await signed_in.get(f"{path}v1/documents/{document_id}")).json()["access"] == "read"
    assert (await signed_in.get(f"/v1/documents/{document_id}")).json()["access"] == "owner"
    share_id = token.split(".")[0]
    await signed_in.post(f"/app/documents/{document_id}/share/{share_id}/revoke", headers=own())
    assert (await signed_in.get(f"{path}v1/documents/{document_id}")).status_code == 401


async def test_only_pdfs_are_shown_by_the_browser(client, made):
    page = await made(client, data=b"<!doctype html><script>alert(1)</script><p>Hello " * 9, name="page.html")
    assert (await client.get(f"/app/documents/{page['id']}/file")).status_code == 415


async def test_lists_are_shown_part_by_part(client, person, made, monkeypatch):
    monkeypatch.setattr(library, "PAGE", 2)
    ann, bob = await person(client.services), await person(client.services, user="bob")
    client.headers.update(ann.headers)
    for i in range(3):
        document = await made(client, data=f"This is about light number {i}. ".encode() * 9, title=f"Document {i}")
        share = {"with": "user", "user": "bob", "access": "ask"}
        await client.post(f"/v1/documents/{document['id']}/shares", json=share)
        for who in (ann, bob):
            body = {"document_ids": [document["id"]], "title": f"Session {i}"}
            assert (await client.post("/v1/sessions", json=body, headers=who.headers)).status_code == 201
    for who in (ann, bob):
        page = (await client.get("/", headers={**HTML, **who.headers})).text
        assert re.findall(r">((?:Document|Session) \d)</a>", page) == [
            "Document 2",
            "Document 1",
            "Session 2",
            "Session 1",
        ]
        links = re.findall(r'data-more [^>]*hx-get="([^"]+)"', page)
        part = {**HTML, **who.headers, "HX-Request": "true"}
        rest = [(await client.get(link.replace("&amp;", "&"), headers=part)).text for link in links]
        assert [re.findall(r">(\w+ \d)</a>", rows) for rows in rest] == [["Document 0"], ["Session 0"]]
        assert not any("data-more" in rows or 'class="empty"' in rows for rows in rest)
        of_other = (
            links[0].replace("&amp;", "&").replace("shared=true&", "") if who is bob else "/app/documents?after=x"
        )
        assert (await client.get(of_other, headers=part)).status_code == 404


@pytest.mark.parametrize("path", ["//evil.example", "https://evil.example", "/\\evil", "evil", "/a\r\nb", ""])
def test_nobody_is_led_to_another_site(path):
    assert own_path(path) == "/"


def test_scripts_and_pages_have_nothing_that_the_policy_forbids():
    for path in (WEB / "templates").glob("*.html"):
        text = path.read_text()
        assert not re.search(r"\son\w+=|\sstyle=|<script(?![^>]*\ssrc=)|<style|\|\s*safe|javascript:", text), path.name
        assert not re.search(r"\bhx-(on|vals=.js)", text), path.name
    for path in (WEB / "static").glob("*.js"):
        if path.name != "htmx.min.js":
            forbidden = r"innerHTML|outerHTML(?!\")|insertAdjacentHTML|document\.write|eval\(|new Function"
            assert not re.search(forbidden, path.read_text()), path.name


def test_the_vendored_script_is_the_one_that_is_named():
    noted = (WEB / "static" / "VENDORED.md").read_text()
    version = re.search(r'version="([\d.]+)"', (WEB / "static" / "htmx.min.js").read_text())
    assert version
    assert f"| {version[1]} |" in noted
    assert {"app.js", "style.css", "icon.svg", "htmx.min.js"} <= set(assets._ASSETS)
    assert "'unsafe" not in json.dumps(frame.HEADERS)
