"""Every format through the API: its content decides, and what is refused says what to do."""

import pytest

from benchmarks.extraction_parts import book_files, pdf_files, web_files, word_files
from benchmarks.extraction_parts.word_files import repacked

DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
READ = {
    "DOCX": (lambda: word_files.FILES["sections"](), "letter.pdf", DOCX),
    "HTML": (lambda: web_files.FILES["report"](), "page.docx", "text/html"),
    "EPUB": (lambda: book_files.FILES["four chapters"](), "book", "application/epub+zip"),
    "PDF": (lambda: pdf_files.FILES["page labels"](), "labels.html", "application/pdf"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", READ)
async def test_its_content_decides_what_a_file_is(client, made, name):
    make, filename, media_type = READ[name]
    file = make()
    body = await made(client, file.data, filename)
    assert (body["status"], body["media_type"], body["warnings"]) == ("ready", media_type, [])
    assert file.n_pages in (None, body["page_count"])
    page = (await client.get(f"/v1/documents/{body['id']}/pages/1")).json()
    assert page["text"]
    assert page["label"] == {"HTML": "Rules of the Harbour", "EPUB": "Part 0", "PDF": "i"}.get(name)


@pytest.mark.anyio
async def test_an_office_document_with_a_password_is_refused_at_once(client, upload, settings):
    locked = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 1016 + "EncryptedPackage".encode("utf-16-le") + b"\0" * 600
    response = await upload(client, locked, "report.docx")
    assert (response.status_code, response.json()["error"]["code"]) == (415, "protected")
    assert "without a password" in response.json()["detail"]
    assert list(settings.files_dir.iterdir()) == []


@pytest.mark.anyio
async def test_macros_and_bombs_fail_with_what_to_do_and_leave_nothing(client, made, files_left):
    plain = word_files.FILES["sections"]().data
    macros = await made(client, repacked(plain, lambda _, part: part, {"word/vbaProject.bin": b"x"}), "a.docx")
    assert (macros["status"], macros["error"]["code"]) == ("failed", "has_macros")
    bomb = await made(client, repacked(plain, lambda _, part: part, {"word/media/a.png": b"\0" * (4 << 20)}), "b.docx")
    assert (bomb["status"], bomb["error"]["code"]) == ("failed", "unsafe_file")
    assert "save it again" in bomb["error"]["message"]
    assert await files_left() == []
