"""Packed documents and pages made to harm their reader: refused in bounded time and memory, nothing left behind."""

import io
import os
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import docx
import psutil
import pytest

from benchmarks.extraction_parts.book_files import chapter, packed
from benchmarks.extraction_parts.word_files import FILES, repacked, saved
from ingest.errors import (
    ContentTooLarge,
    DamagedFile,
    EmptyDocument,
    HasMacros,
    IngestError,
    LimitReached,
    Protected,
    TooManyPages,
    UnsafeFile,
    UnsupportedType,
)
from ingest.extract import extract
from ingest.formats.archive import open_archive
from ingest.limits import ParseLimits
from ingest.sandbox import parse
from ingest.wire import Finished, PageRead

MIB = 1024 * 1024
LAUGHS = (
    b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">'
    b'<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]><x>&c;</x>'
)
OUTSIDE = b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><x>&a;</x>'


def word(text: str = "the supplier pays") -> bytes:
    document = docx.Document()
    document.add_paragraph(text)
    return saved(document)


def with_part(name: str, part: bytes, data: bytes | None = None) -> bytes:
    """A Word document in which a part is another, or is there beside the others."""
    data = data or word()
    names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    return repacked(data, lambda each, old: part if each == name else old, {} if name in names else {name: part})


def encrypted_zip() -> bytes:
    data = bytearray(word())
    at = data.find(b"PK\x03\x04")
    while at >= 0:
        data[at + 6] |= 1
        at = data.find(b"PK\x03\x04", at + 4)
    at = data.find(b"PK\x01\x02")
    while at >= 0:
        data[at + 8] |= 1
        at = data.find(b"PK\x01\x02", at + 4)
    return bytes(data)


def twice_the_same() -> bytes:
    buffer = io.BytesIO(word())
    with zipfile.ZipFile(buffer, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("word/document.xml", b"<x/>")
    return buffer.getvalue()


def overlapping() -> bytes:
    """Every part is the same one, as in bombs that are small and unpack without nesting."""
    data = with_part("word/big.xml", os.urandom(60_000))
    start = data.rindex(b"PK\x05\x06")
    first = data.index(b"PK\x01\x02")
    entry_at = data.rindex(b"PK\x01\x02")
    entry = data[entry_at:start]
    copies = b"".join(entry.replace(b"word/big.xml", b"word/b%02d.xml" % n) for n in range(40))
    directory = data[first:start] + copies
    n = int.from_bytes(data[start + 10 : start + 12], "little") + 40
    end = b"PK\x05\x06\0\0\0\0" + n.to_bytes(2, "little") * 2 + len(directory).to_bytes(4, "little")
    return data[:first] + directory + end + first.to_bytes(4, "little") + b"\0\0"


def book_with(protection: bytes) -> bytes:
    return packed([("a.xhtml", chapter("<p>x</p>"))], more={"META-INF/encryption.xml": protection})


def protected_book() -> bytes:
    return book_with(
        b'<encryption><EncryptedData><EncryptionMethod Algorithm="http://www.w3.org/2001/04/xmlenc#aes128-cbc"/>'
        b'<CipherData><CipherReference URI="OEBPS/a.xhtml"/></CipherData></EncryptedData></encryption>'
    )


def broken_notes() -> bytes:
    return with_part("word/footnotes.xml", b"<w:footnotes", FILES["footnotes and endnotes"]().data)


def missing_text() -> bytes:
    return word().replace(b"word/document.xml", b"word/d0cument.xml")


def nested_page() -> bytes:
    return b"<html>" + b"<div>" * 200_000 + b"x"


def zipped(**parts: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name.replace("__", "/"), part)
    return buffer.getvalue()


def many_chapters(n: int) -> bytes:
    return packed([(f"{number}.xhtml", chapter("<p>x</p>")) for number in range(n)])


def in_word(part: bytes, name: str = "word/document.xml") -> Callable[[], bytes]:
    return lambda: with_part(name, part)


WIDE_LAUGHS = LAUGHS.decode().replace('"1.0"', '"1.0" encoding="UTF-16"').encode("utf-16")
DEEP = b"<a>" * 100_000 + b"</a>" * 100_000
Refusal = tuple[Callable[[], bytes], type[IngestError], str]
REFUSED: dict[str, Refusal] = {
    "a bomb in the text": (in_word(b" " * 30 * MIB), UnsafeFile, "250 times its size"),
    "a bomb beside the text": (in_word(b"\0" * 30 * MIB, "word/media/a.png"), UnsafeFile, "ZIP bomb"),
    "parts that overlap": (overlapping, UnsafeFile, "overlap"),
    "entities": (in_word(LAUGHS), UnsafeFile, "defines entities"),
    "entities in UTF-16": (in_word(WIDE_LAUGHS), UnsafeFile, "defines entities"),
    "entities in the styles": (in_word(LAUGHS, "word/styles.xml"), UnsafeFile, "defines entities"),
    "an entity from outside": (in_word(OUTSIDE, "_rels/.rels"), UnsafeFile, "defines entities"),
    "entities in a book": (lambda: book_with(OUTSIDE), UnsafeFile, "defines entities"),
    "a name that leads up": (in_word(b"x", "word/../../etc/cron.d/x"), UnsafeFile, "leads out"),
    "an absolute name": (in_word(b"x", "/etc/passwd"), UnsafeFile, "leads out"),
    "a name for Windows": (in_word(b"x", "C:\\x.exe"), UnsafeFile, "leads out"),
    "one name twice": (twice_the_same, UnsafeFile, "same name"),
    "macros": (in_word(b"x", "word/vbaProject.bin"), HasMacros, "Save it as a document without macros"),
    "a packed file with a password": (encrypted_zip, Protected, "save it without a password"),
    "a shop's book": (protected_book, Protected, "This EPUB book is protected"),
    "no text part": (missing_text, DamagedFile, "is missing"),
    "text that is no XML": (in_word(b"<w:document"), DamagedFile, "as a Word document"),
    "notes that are no XML": (broken_notes, DamagedFile, "as a Word document"),
    "numbers that are no XML": (in_word(b"<w:numbering", "word/numbering.xml"), DamagedFile, "as a Word document"),
    "another root": (in_word(b"<x/>"), DamagedFile, "as a Word document"),
    "XML nested deep": (in_word(DEEP), DamagedFile, "as a Word document"),
    "cut in half": (lambda: word()[: len(word()) // 2], DamagedFile, "container cannot be read"),
    "a book without chapters": (lambda: packed([]), DamagedFile, "none of its chapters"),
    "a ZIP in a ZIP": (lambda: zipped(inner=word()), UnsupportedType, "a ZIP archive"),
    "a spreadsheet": (lambda: zipped(xl__workbook=b""), UnsupportedType, "XLSX"),
    "an empty Word document": (lambda: word(""), EmptyDocument, "no text"),
    "a page of scripts": (lambda: b"<!doctype html><body><script>x()</script></body>", EmptyDocument, "no text"),
    "elements nested deep": (nested_page, DamagedFile, "nested too deeply"),
    "too many chapters": (lambda: many_chapters(61), TooManyPages, "61 pages; the limit is 60"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_reason(name: str, put: Callable[[bytes], Path]):
    make, error, says = REFUSED[name]
    path = put(make())
    started = time.process_time()
    with pytest.raises(error) as caught:
        list(extract(path, ParseLimits(max_pages=60)))
    assert type(caught.value) is error
    assert says in str(caught.value)
    assert time.process_time() - started < 5


SMALL = ParseLimits(unpacked_nbytes=MIB, markup_nbytes=256 * 1024)


@pytest.mark.parametrize(
    "data",
    [
        in_word(os.urandom(2 * MIB), "word/media/a.bin")(),
        in_word(b"<!-- " + os.urandom(200 * 1024).hex().encode() + b" -->")(),
        b"<html>" + b"<p>word</p>" * 30_000,
    ],
    ids=["all parts", "one part", "one page"],
)
def test_what_is_too_large_is_refused_with_the_numbers(data: bytes, put: Callable[[bytes], Path]):
    with pytest.raises(ContentTooLarge, match=r"The document has [\d,]+ bytes of .*; the limit is [\d,]+\. Split it"):
        list(extract(put(data), SMALL))


def test_pictures_inside_a_page_do_not_count(put: Callable[[bytes], Path]):
    page = b'<html><img alt="Plan" src="data:image/png;base64,' + b"A" * 500_000 + b'"><p>Text</p>'
    messages = list(extract(put(page), SMALL))
    assert [message.text for message in messages if isinstance(message, PageRead)] == ["[image: Plan]\n\nText"]


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["a bomb in the text", "macros", "elements nested deep"])
async def test_nothing_is_left_behind(name: str, put: Callable[[bytes], Path], tmp_path: Path):
    me = psutil.Process()
    children = set(me.children(recursive=True))
    path = put(REFUSED[name][0]())
    with pytest.raises(REFUSED[name][1]):
        await parse(path)
    assert set(me.children(recursive=True)) <= children
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.anyio
async def test_a_page_that_takes_all_memory_ends_within_its_limit(put: Callable[[bytes], Path]):
    page = b"<html><body>" + b"<b>a</b>" * 600_000
    with pytest.raises(LimitReached, match="memory and was stopped"):
        await parse(put(page), limits=ParseLimits(memory_nbytes=192 * MIB))


def test_a_part_that_holds_more_than_it_says_is_not_unpacked_whole(put: Callable[[bytes], Path]):
    buffer, nbytes = io.BytesIO(), 16 * MIB + 12_345
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.xml", bytes(nbytes))
    lying = buffer.getvalue().replace(nbytes.to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    with open_archive(put(lying), ParseLimits()) as archive:
        tracemalloc.start()
        try:
            with pytest.raises(DamagedFile):
                archive.read("a.xml")
            assert tracemalloc.get_traced_memory()[1] < MIB
        finally:
            tracemalloc.stop()


def test_a_chapter_listed_twice_is_read_once(put: Callable[[bytes], Path]):
    book = packed([("a.xhtml", chapter("<p>once</p>")), ("a.xhtml#part", "")])
    messages = list(extract(put(book), ParseLimits()))
    assert [message.text for message in messages if isinstance(message, PageRead)] == ["once"]


def test_lost_chapters_are_a_warning(put: Callable[[bytes], Path]):
    book = packed([("a.xhtml", chapter("<p>here</p>")), ("b.xhtml", chapter("<p>gone</p>"))])
    messages = list(extract(put(book.replace(b"OEBPS/b.xhtml", b"OEBPS/c.xhtml")), ParseLimits()))
    assert [message.text for message in messages if isinstance(message, PageRead)] == ["here"]
    assert messages[-1] == Finished(["1 chapter of 2 could not be read."])
