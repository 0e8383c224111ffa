"""Kinds of file, told by content alone."""

import contextlib
import io
import time
import zipfile

import pytest

from ingest.errors import Protected, UnsupportedType
from ingest.model import MediaType
from ingest.sniff import SNIFF_NBYTES, looks_like_markdown, sniff


def zipped(*names: str, mimetype: str = "") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        if mimetype:
            archive.writestr("mimetype", mimetype)
        for name in names:
            archive.writestr(name, "x")
    return buffer.getvalue()


REFUSED = {
    "XLSX": (zipped("xl/workbook.xml"), "an Excel workbook (XLSX)"),
    "ODT": (zipped(mimetype="application/vnd.oasis.opendocument.text"), "an OpenDocument file"),
    "ZIP": (zipped("contract.pdf"), "a ZIP archive"),
    "empty ZIP": (zipped(), "a ZIP archive"),
    "DOC": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600, "an old Microsoft Office document"),
    "RTF": (b"{\\rtf1\\ansi Hello}", "a rich text (RTF) document"),
    "PNG": (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "a PNG image"),
    "JPEG": (b"\xff\xd8\xff\xe0" + b"\0" * 40, "a JPEG image"),
    "HEIC": (b"\0\0\0\x18ftypheic" + b"\0" * 40, "an HEIC or AVIF image"),
    "WebP": (b"RIFF\x10\0\0\0WEBPVP8 ", "a WebP image"),
    "ELF": (b"\x7fELF\x02\x01\x01" + b"\0" * 60, "an executable program"),
    "EXE": (b"MZ\x90\0\x03" + b"\0" * 60, "an executable program"),
    "gzip": (b"\x1f\x8b\x08\0" + b"\0" * 20, "a gzip archive"),
    "SVG": (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG image"),
    "SVG behind entities": (b'<!DOCTYPE svg [<!ENTITY a "b">]>\n<svg/>', "an SVG image"),
    "noise": (bytes((i * 197 + 31) % 256 for i in range(4000)), "binary data"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_formats_are_named_in_the_refusal(name: str):
    content, looks_like = REFUSED[name]
    with pytest.raises(UnsupportedType) as caught:
        sniff(content)
    assert looks_like in str(caught.value)
    assert "Convert it to PDF, DOCX, HTML, EPUB, Markdown or plain text" in str(caught.value)


MARKDOWN = b"# Title\n\nSome text.\n\n## Part\n\n- one\n- two\n"
ACCEPTED = {
    "PDF": (b"%PDF-1.7\n", MediaType.PDF),
    "PDF behind white space": (b"\n\n  %PDF-1.4\n1 0 obj", MediaType.PDF),
    "PDF behind 1,000 bytes of junk": (b"\xfe\xff\x01" * 333 + b"\n%PDF-1.4\n1 0 obj\n<<", MediaType.PDF),
    "text about PDF": (b"Every such file begins with %PDF-1.4 and holds lines like 1 0 obj.", MediaType.TEXT),
    "DOCX": (zipped("[Content_Types].xml", "word/document.xml"), MediaType.DOCX),
    "DOCX that begins with pictures": (
        zipped("[Content_Types].xml", *(f"media/{n}-{'x' * 200}.png" for n in range(300))),
        MediaType.DOCX,
    ),
    "EPUB": (zipped("META-INF/container.xml", mimetype="application/epub+zip"), MediaType.EPUB),
    "EPUB without its mark": (zipped("META-INF/container.xml", "book.opf"), MediaType.EPUB),
    "HTML": (b"\n<!DOCTYPE html>\n<html><body>Hello</body></html>", MediaType.HTML),
    "HTML behind a comment": (b"<!-- saved from -->\n<HTML lang=en>", MediaType.HTML),
    "HTML in UTF-16": ("<html><body>Grüße</body></html>".encode("utf-16"), MediaType.HTML),
    "HTML without a frame": (b"<div><p>One</p><p>Two <b>words</b></p></div>", MediaType.HTML),
    "HTML without a frame behind comments": (
        b"<!-- a --> <!-- b -->\n<div><svg></svg><p>One</p><p>Two <b>words</b></p></div>",
        MediaType.HTML,
    ),
    "text that begins with an element": (b"<p> is the element for paragraphs.\n", MediaType.TEXT),
    "Markdown": (MARKDOWN, MediaType.MARKDOWN),
    "Markdown in UTF-16 with CRLF": (
        MARKDOWN.replace(b"\n", b"\r\n").decode().encode("utf-16"),
        MediaType.MARKDOWN,
    ),
    "Markdown with HTML on top": (
        b'<p align="center">Logo</p>\n\n# Name\n\nSee [x](y).\n',
        MediaType.MARKDOWN,
    ),
    "table only": (b"Prices\n\n| a | b |\n|---|---|\n| 1 | 2 |\n", MediaType.MARKDOWN),
    "letter": (b"Dear Ms Jones,\n\nplease find enclosed\n- the contract\n- the invoice\n", MediaType.TEXT),
    "shell script": (b"#!/bin/sh\n# usage: x\n# second line\nset -e\n# more\necho hi\n", MediaType.TEXT),
    "CSV": (b"name,price\nA,1\nB,2\n", MediaType.TEXT),
    "text that begins like a program": (b"MZ is the name of a country code in Africa.\n", MediaType.TEXT),
    "Latin-1": ("Café crème à la carte\n".encode("latin-1"), MediaType.TEXT),
    "one byte": (b"a", MediaType.TEXT),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str):
    content, media_type = ACCEPTED[name]
    assert sniff(content) is media_type


SLOW = {
    "comments": b"<!---->" * 9000 + b"x",
    "comments between elements": b"<!-- a --><p>" + b"</p> <!-- b -->" * 4000,
    "a row and its rule": b"x\n" + b"|" * 30_000 + b"\n" + b"|--" * 10_000 + b"x\n",
    "a rule of spaces": b"a|b\n" + b" " * 60_000 + b"x",
    "brackets": b"[" * 65_000,
    "links": b"[a](" * 16_000,
    "a fence": b"~" * 65_000,
    "a heading": b"# a" + b" " * 60_000 + b"b\nc",
    "digits": b"junk\n%PDF-1.4\n" + b"1" * 65_000,
}


@pytest.mark.parametrize("name", SLOW)
def test_nothing_takes_long_to_tell(name: str):
    """The server asks it of every upload, while others wait."""
    started = time.process_time()
    with contextlib.suppress(UnsupportedType):
        sniff(SLOW[name])
    assert time.process_time() - started < 1


def test_a_cut_inside_a_character_decides_nothing():
    assert sniff(("é" * SNIFF_NBYTES).encode()[: SNIFF_NBYTES - 1] + b"\xc3") is MediaType.TEXT
    assert sniff(("漢字 " * SNIFF_NBYTES).encode()[:SNIFF_NBYTES]) is MediaType.TEXT


@pytest.mark.parametrize("text", ["", "#hashtag\n", "a * b * c", "1. one\n2. two\n", "x\n---\n"])
def test_little_structure_is_not_markdown(text: str):
    assert not looks_like_markdown(text)


def test_an_office_document_with_a_password_says_so():
    head = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 1016 + "EncryptedPackage".encode("utf-16-le") + b"\0" * 96
    with pytest.raises(Protected, match="save it without a password"):
        sniff(head)
