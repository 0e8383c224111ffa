"""Whatever the bytes: a document or an IngestError, never another exception."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.extraction_parts import book_files, web_files, word_files
from benchmarks.extraction_parts.word_files import repacked
from ingest.errors import IngestError
from ingest.extract import extract
from ingest.limits import ParseLimits
from ingest.wire import Finished, Opened, PageRead, pack
from tests.ingest.pdf_maker import PdfMaker

LIMITS = ParseLimits(max_pages=50, text_nbytes=1_000_000)
SLOW_AND_SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
FEW = settings(max_examples=50, deadline=None, suppress_health_check=SLOW_AND_SHARED)
FUZZ = settings(max_examples=120, deadline=None, suppress_health_check=SLOW_AND_SHARED)
MAKER = PdfMaker()
SEEDS = [
    MAKER.with_text("one page of text", "another (with) \\ marks"),
    MAKER.scanned(2, text_on=(1,)),
    MAKER.encrypted("", "owner"),
    MAKER.one_page(b"BT /F1 9 Tf [(a) -200 (b)] TJ ET q /X Do Q"),
]
TOKENS = [
    b"obj",
    b"endobj",
    b"stream",
    b"<<",
    b">>",
    b"[",
    b"/Kids",
    b"/Count -1",
    b"1 0 R",
    b"3 0 R",
    b"xref",
    b"\0",
]

WORD = {name: word_files.FILES[name]().data for name in ("counted clauses", "footnotes and endnotes", "text box")}
BOOK = book_files.FILES["report with lists and a table"]().data
PAGE = web_files.FILES["tables with spans"]().data
MARKUP = [
    b"<w:p>", b"</w:p>", b"<w:tbl>", b"</w:tc>", b"<w:br w:type='page'/>", b"<w:numId w:val='-7'/>", b"&#x0;",
    b"&x;", b"<![CDATA[", b"<td rowspan=99999 colspan=99999>", b"<table>",
    b"<li value=x>", b"<script>", b"href='../../..'", b"\xff",
]  # fmt: skip
CHANGES = st.lists(st.tuples(st.floats(0, 1), st.sampled_from(MARKUP) | st.binary(max_size=6)), min_size=1, max_size=6)


def changed(data: bytes, changes: list[tuple[float, bytes]], *, insert: bool = False) -> bytes:
    mutated = bytearray(data)
    for where, what in changes:
        at = int(where * len(mutated))
        mutated[at : at if insert else at + len(what)] = what
    return bytes(mutated)


def check(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        messages = list(extract(path, LIMITS))
    except IngestError:
        return
    pages = [message for message in messages if isinstance(message, PageRead)]
    assert isinstance(messages[0], Opened)
    assert isinstance(messages[-1], Finished)
    assert [page.number for page in pages] == list(range(1, messages[0].n_pages + 1))
    assert any(page.text for page in pages)
    assert all(pack(message) for message in messages)


@pytest.fixture
def upload(tmp_path: Path) -> Path:
    return tmp_path / "upload"


@FUZZ
@given(st.binary(max_size=2_000))
def test_random_bytes(upload: Path, data: bytes):
    check(upload, data)


@FUZZ
@given(st.text(max_size=500), st.sampled_from(["utf-8", "utf-16", "gb18030", "utf-16-be"]))
def test_random_text(upload: Path, text: str, encoding: str):
    check(upload, text.encode(encoding, "ignore"))


@FUZZ
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from(TOKENS) | st.binary(max_size=6)), min_size=1, max_size=8),
)
def test_mutated_pdfs(upload: Path, seed: bytes, changes: list[tuple[float, bytes]]):
    check(upload, changed(seed, changes))


@FUZZ
@given(st.sampled_from(SEEDS), st.floats(0, 1), st.floats(0, 1))
def test_cut_pdfs(upload: Path, seed: bytes, first: float, last: float):
    start, end = sorted((int(first * len(seed)), int(last * len(seed))))
    check(upload, seed[:end])
    check(upload, seed[:start] + seed[end:])


@FEW
@given(st.sampled_from([*WORD.values(), BOOK]), CHANGES)
def test_packed_documents_with_wrong_bytes(upload: Path, seed: bytes, changes: list[tuple[float, bytes]]):
    check(upload, changed(seed, changes))


@FEW
@given(
    st.sampled_from(list(WORD.values())),
    st.sampled_from(["word/document.xml", "word/numbering.xml", "word/styles.xml", "word/footnotes.xml"]),
    CHANGES,
    st.booleans(),
)
def test_word_documents_with_wrong_markup(upload: Path, seed: bytes, part: str, changes, insert: bool):
    check(upload, repacked(seed, lambda name, old: changed(old, changes, insert=insert) if name == part else old))


@FEW
@given(st.sampled_from(["OEBPS/text.xhtml", "OEBPS/book.opf", "META-INF/container.xml"]), CHANGES, st.booleans())
def test_books_with_wrong_markup(upload: Path, part: str, changes: list[tuple[float, bytes]], insert: bool):
    check(upload, repacked(BOOK, lambda name, old: changed(old, changes, insert=insert) if name == part else old))


@FEW
@given(CHANGES, st.booleans())
def test_pages_with_wrong_markup(upload: Path, changes: list[tuple[float, bytes]], insert: bool):
    check(upload, changed(PAGE, changes, insert=insert))
