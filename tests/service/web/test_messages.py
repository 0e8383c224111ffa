"""What the page says in each language."""

import re
from pathlib import Path

import pytest

from ingest.errors import ERRORS
from service import errors
from service.web import catalogue

WEB = Path(catalogue.__file__).parent
HTML = {"Accept": "text/html"}
OWN = {"Origin": "http://localhost"}

pytestmark = pytest.mark.anyio


def test_both_languages_have_every_message_with_the_same_values():
    english, chinese = catalogue.messages("en"), catalogue.messages("zh")
    assert [key for key in chinese if key in english] == list(english)
    # An English reader has the server's own sentence, which says more than a word for its code.
    assert all(key.startswith("js.problem.") for key in set(chinese) - set(english))
    for key, text in english.items():
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", chinese[key])), key


NOT_ON_THE_PAGE = {
    "settings", "data_dir_in_use", "no_database", "no_redis", "previous_response_not_found", "too_many_uploads",
    "parts_elsewhere", "upload_not_pending",
}  # fmt: skip
"""Codes of the command line, of a start, and of calls that the page does not make."""


def test_whatever_the_page_is_refused_has_chinese_words():
    service = WEB.parent
    folders = [service / "core", service / "api", service / "web"]
    files = [path for folder in folders for path in folder.rglob("*.py") if "openai" not in path.parts]
    codes = {code for path in files for code in re.findall(r'\bcode="([a-z_]+)"', path.read_text())}
    codes |= {kind.code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    codes |= set(ERRORS)
    chinese = catalogue.messages("zh")
    assert {code for code in codes - NOT_ON_THE_PAGE if f"js.problem.{code}" not in chinese} == set()
    assert codes >= NOT_ON_THE_PAGE


async def test_the_chinese_page_says_it_in_chinese_and_keeps_the_servers_sentence(client, upload, until):
    document_id = (await upload(client, data=b" \n ", name="empty.txt")).json()["id"]
    await until(client, document_id, "failed")
    for path in ("/", f"/app/documents/{document_id}"):
        page = (await client.get(path, headers={**HTML, "Accept-Language": "zh"})).text
        assert "<strong>文档中没有文字。请上传含有文字的文件。</strong>" in page
        assert re.search(
            r'<details class="original"><summary>服务器原文（英文）</summary><span lang="en">The doc', page
        )
        page = (await client.get(path, headers=HTML)).text
        assert re.search(r'<strong>Could not be read.</strong> <span lang="en">The document is empty', page)
        assert "<details class=" not in page
    page = (await client.get("/app/documents/doc_none", headers={**HTML, "Accept-Language": "zh"})).text
    assert "<h1>内容不存在" in page
    assert '<details class="original">' in page


def test_every_message_that_is_used_is_there_and_none_is_for_nothing():
    templates = "".join(path.read_text() for path in (WEB / "templates").glob("*.html"))
    scripts = "".join(path.read_text() for path in (WEB / "static").glob("*.js") if path.name != "htmx.min.js")
    used = set(re.findall(r"\bt\('([\w.]+\w)'", templates))
    used |= {f"js.{key}" for key in re.findall(r'\b(?:t|key)\("([\w.]+\w)"', scripts)}
    counted = re.findall(r"\btn\('([\w.]+)'", templates) + [f"js.{k}" for k in re.findall(r'\btn\("([\w.]+)"', scripts)]
    used |= {f"{key}.{form}" for key in counted for form in ("one", "other")}
    known = set(catalogue.messages("en"))
    assert used <= known
    computed = r"(js\.)?(status|tier|problem|cost|removed|theme|share\.access|sign_in\.refused|share\.kind)\."
    literal = set(re.findall(r"[\"'`](?:js\.)?([\w.]+)[\"'`]", scripts))
    spare = {key for key in known - used if not re.match(computed, key) and key.removeprefix("js.") not in literal}
    assert spare == set()


@pytest.mark.parametrize(
    ("chosen", "accepted", "language"),
    [(None, "", "en"), (None, "zh-CN,zh;q=0.9,en;q=0.8", "zh"), (None, "fr, en;q=0.5, zh;q=0.7", "zh"),
     ("en", "zh", "en"), ("xx", "zh", "zh"), (None, "zh;q=x", "en"), (None, "zh;q=0", "en")],
)  # fmt: skip
def test_the_language_is_the_chosen_one_or_the_browsers(chosen, accepted, language):
    assert catalogue.language_of(chosen, accepted) == language


async def test_language_and_theme_are_kept(client):
    page = await client.get("/", headers={"Accept-Language": "zh"})
    assert '<html lang="zh" data-theme="auto">' in page.text
    await client.post("/app/preferences", data={"language": "en", "theme": "x"}, headers=OWN)
    await client.post("/app/preferences", data={"theme": "dark", "next": "//evil.example"}, headers=OWN)
    assert '<html lang="en" data-theme="dark">' in (await client.get("/", headers={"Accept-Language": "zh"})).text
