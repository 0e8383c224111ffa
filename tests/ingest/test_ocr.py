"""Scanned pages, with a stand-in for Tesseract: when it is asked, for what, and what its failures come to."""

import asyncio
import io
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pypdf import PdfReader, PdfWriter
from pypdf.annotations import FreeText

from ingest.errors import NoTextLayer
from ingest.limits import ParseLimits
from ingest.ocr import find_recognizer
from ingest.pdf_pages import read_pdf
from ingest.sandbox import parse
from ingest.wire import Finished, PageRead
from tests.ingest.pdf_maker import PdfMaker

Put = Callable[[bytes], Path]
LIMITS = ParseLimits(ocr_languages="eng+deu")
SCRIPT = """#!/bin/sh
if [ "$1" = --list-langs ]; then
    echo "List of available languages:"; printf '%s\\n' {languages}
    exit
fi
{logging}
cat > /dev/null
{act}
"""


@pytest.fixture
def tesseract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put a program of that name on the path; gives the file in which it writes how it was called."""

    def make(act: str = "echo 'Read by recognition.'", languages: str = "eng deu osd", *, logs: bool = True) -> Path:
        folder, log = tmp_path / "bin", tmp_path / "log"
        folder.mkdir()
        program = folder / "tesseract"
        logging = f'echo "$@" >> {log}; head -c 2 >> {log}' if logs else ""
        program.write_text(SCRIPT.format(languages=languages, logging=logging, act=act))
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return log

    return make


def read(path: Path, limits: ParseLimits = LIMITS) -> tuple[list[str], list[str]]:
    messages = list(read_pdf(path, limits, None))
    assert isinstance(messages[-1], Finished)
    return [message.text for message in messages if isinstance(message, PageRead)], messages[-1].warnings


def test_only_pages_without_text_are_read_and_the_warning_names_them(pdf: PdfMaker, put: Put, tesseract):
    log = tesseract()
    pages, warnings = read(put(pdf.scanned(4, text_on=(2, 4))))
    assert [page.startswith("Read by") for page in pages] == [True, False, True, False]
    assert warnings == ["2 of 4 pages were read by text recognition, which makes mistakes: pages 1, 3."]
    assert log.read_text() == "stdin stdout -l eng+deu --psm 1 --dpi 300\nP5" * 2


def test_pages_that_cannot_be_read_otherwise_are_looked_at(put: Put, pdf: PdfMaker, tesseract):
    tesseract()
    font = (
        b"/Font<</F1<</Type/Font/Subtype/Type0/BaseFont/AAAAAA+X/Encoding/Identity-H/DescendantFonts[<<"
        b"/Type/Font/Subtype/CIDFontType2/BaseFont/AAAAAA+X"
        b"/CIDSystemInfo<</Registry(Adobe)/Ordering(Identity)/Supplement 0>>>>]>>>>"
    )
    poor = pdf.one_page(b"BT /F1 9 Tf <00030004> Tj ET", resources=font)
    assert read(put(poor))[0] == ["Read by recognition."]


def test_a_page_whose_font_is_missing_is_looked_at(pdf: PdfMaker, put: Put, tesseract):
    tesseract()
    pages, warnings = read(put(pdf.one_page(b"BT /F9 9 Tf <0102> Tj ET")))
    assert pages == ["Read by recognition."]
    assert warnings == ["1 of 1 page was read by text recognition, which makes mistakes: page 1."]


def test_a_blank_page_is_not_read(pdf: PdfMaker, put: Put, tesseract):
    log = tesseract()
    assert read(put(pdf.with_text("text", "")))[0] == ["text", ""]
    assert not log.exists()


def typed_onto(data: bytes) -> bytes:
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(data)))
    writer.add_annotation(0, FreeText(text="Approved", rect=(50, 550, 200, 650)))
    buffer = io.BytesIO()
    writer.write(buffer)
    return buffer.getvalue()


def test_what_is_typed_onto_a_scan_is_not_all_of_it(pdf: PdfMaker, put: Put, tesseract, tmp_path, monkeypatch):
    tesseract()
    path = put(typed_onto(pdf.scanned(1)))
    assert read(path)[0] == ["Read by recognition.\n\nApproved"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read(path) == (
        ["Approved"],
        ["1 of 1 page has text that could not be read, but for what was filled in: page 1."],
    )


def test_a_language_that_is_not_installed_is_said(pdf: PdfMaker, put: Put, tesseract):
    log = tesseract(languages="eng")
    _, warnings = read(put(pdf.scanned(1)))
    assert "Text recognition lacks the languages deu." in warnings
    assert "-l eng --psm 3" in log.read_text()


FAILURES = {
    "no words": ({"act": "echo ' .. '"}, "eng", "found no words"),
    "it fails": ({"act": "exit 1"}, "eng", "found no words"),
    "it takes too long": ({"act": "exec sleep 60"}, "eng", "found no words"),
    "no language": ({"languages": "fra"}, "eng", "tesseract-ocr-eng"),
    "switched off": ({}, "", "off here"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_a_scan_is_refused_with(name: str, pdf: PdfMaker, put: Put, tesseract):
    how, languages, says = FAILURES[name]
    tesseract(**how)
    started = time.monotonic()
    with pytest.raises(NoTextLayer, match="1 of 1 page has no text layer") as caught:
        read(put(pdf.scanned(1)), ParseLimits(ocr_languages=languages, ocr_page_s=0.5))
    assert says in str(caught.value)
    assert time.monotonic() - started < 20


def test_without_tesseract_the_refusal_says_how_to_install_it(pdf: PdfMaker, put: Put, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoTextLayer, match="apt-get install tesseract-ocr"):
        read(put(pdf.scanned(2)))
    pages, warnings = read(put(pdf.scanned(3, text_on=(1, 2))))
    assert pages[2] == ""
    assert warnings == ["1 of 3 pages has no text layer and cannot be asked about: page 3."]


def test_one_page_that_takes_too_long_leaves_the_others(pdf: PdfMaker, put: Put, tesseract, tmp_path: Path):
    tesseract(act=f"[ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; exec sleep 60; }}\necho 'Read at last'")
    pages, warnings = read(put(pdf.scanned(2)), ParseLimits(ocr_languages="eng", ocr_page_s=4))
    assert pages == ["", "Read at last"]
    assert "1 of 2 pages was given up by text recognition: page 1." in warnings


@pytest.mark.anyio
async def test_recognition_ends_with_the_parser(pdf: PdfMaker, put: Put, tesseract):
    # The parser process writes no files, and so its children do not.
    tesseract(act="exec sleep 60", logs=False)
    task = asyncio.create_task(parse(put(pdf.scanned(1)), limits=LIMITS))
    sleeper = None
    for _ in range(600):
        children = psutil.Process().children(recursive=True)
        sleeper = next((child for child in children if _name(child) == "sleep"), None)
        if sleeper is not None:
            break
        await asyncio.sleep(0.05)
    assert sleeper is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    _, left = await asyncio.to_thread(psutil.wait_procs, [sleeper], 10)
    assert all(_name(process) in ("", "sleep") and _is_zombie(process) for process in left)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _is_zombie(process: psutil.Process) -> bool:
    """Where nothing collects orphans, as in some containers, a dead one stays one."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("languages", ["eng;rm", "-l eng", "eng+", "../x y"])
def test_languages_are_names(languages: str):
    with pytest.raises(ValueError, match="ocr_languages"):
        ParseLimits(ocr_languages=languages)


def test_off_is_off(tesseract):
    tesseract()
    assert find_recognizer(ParseLimits()) == (None, "off")
