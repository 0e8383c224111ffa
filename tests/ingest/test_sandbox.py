"""The parser process: right answers, every limit, and nothing left behind."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ingest.errors import ParseCancelled, ParserMemory, ParserTimeout, TextTooLong, TooManyPages
from ingest.limits import ParseLimits
from ingest.model import MediaType
from ingest.sandbox import parse
from tests.ingest.pdf_maker import PdfMaker

pytestmark = pytest.mark.anyio
Put = Callable[[bytes], Path]
MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No child process, running or zombie, and no descriptor more than before."""
    me = psutil.Process()
    before, children = me.num_fds(), set(me.children())  # servers of other tests
    yield
    assert set(me.children()) <= children
    assert me.num_fds() <= before


async def test_pages_come_in_order_with_progress(pdf: PdfMaker, put: Put):
    seen: list[tuple[int, int]] = []
    document = await parse(
        put(pdf.with_text("one", "two", "three")), on_progress=lambda done, total: seen.append((done, total))
    )
    assert document.media_type is MediaType.PDF
    assert [(page.number, page.text) for page in document.pages] == [(1, "one"), (2, "two"), (3, "three")]
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


async def test_a_page_that_never_ends_is_killed(pdf: PdfMaker, put: Put):
    started = time.monotonic()
    with pytest.raises(ParserTimeout, match=r"page 1 of 1 took longer than 2 s") as caught:
        await parse(put(pdf.hanging()), limits=ParseLimits(page_wall_s=2))
    assert time.monotonic() - started < 10
    assert caught.value.code == "parser_timeout"


async def test_the_whole_document_has_a_deadline(pdf: PdfMaker, put: Put):
    with pytest.raises(ParserTimeout, match="whole document"):
        await parse(put(pdf.hanging()), limits=ParseLimits(wall_s=1.5))


async def test_the_kernel_ends_it_when_its_processor_time_is_spent(pdf: PdfMaker, put: Put):
    with pytest.raises(ParserTimeout, match="1 s of processor time"):
        await parse(put(pdf.hanging()), limits=ParseLimits(cpu_s=1))


async def test_memory_is_bounded(pdf: PdfMaker, put: Put):
    with pytest.raises(ParserMemory, match="192 MiB"):
        await parse(put(pdf.memory_eater()), limits=ParseLimits(memory_nbytes=192 * MIB))


async def test_cancelling_by_event_kills_the_parser(pdf: PdfMaker, put: Put):
    cancel = asyncio.Event()
    asyncio.get_running_loop().call_later(0.8, cancel.set)
    with pytest.raises(ParseCancelled):
        await parse(put(pdf.hanging()), cancel=cancel)


async def test_cancelling_the_task_kills_the_parser(pdf: PdfMaker, put: Put):
    task = asyncio.create_task(parse(put(pdf.hanging())))
    await asyncio.sleep(0.8)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_ten_thousand_pages_are_refused_with_the_numbers(pdf: PdfMaker, put: Put):
    with pytest.raises(TooManyPages, match=r"10,000 pages; the limit is 5,000"):
        await parse(put(pdf.blank(10_000)))


async def test_text_over_the_limit_is_refused(put: Put):
    with pytest.raises(TextTooLong, match="1,000"):
        await parse(put(b"word " * 300), limits=ParseLimits(text_nbytes=1_000))


async def test_a_file_that_is_not_there_is_not_an_ingest_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        await parse(tmp_path / "none")


async def test_the_name_decides_nothing(pdf: PdfMaker, tmp_path: Path):
    path = tmp_path / "\N{PAGE FACING UP} ..%2F report;rm -rf.docx"
    path.write_bytes(pdf.with_text("hello"))
    assert (await parse(path)).media_type is MediaType.PDF


async def test_the_password_is_not_on_the_command_line(pdf: PdfMaker, put: Put):
    others = set(psutil.Process().children())
    task = asyncio.create_task(parse(put(pdf.hanging()), password="open sesame"))
    children = await _until(lambda: set(psutil.Process().children()) - others)
    assert children
    assert all("sesame" not in " ".join([*child.cmdline(), *child.environ().values()]) for child in children)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_no_parser_outlives_a_killed_parent(pdf: PdfMaker, put: Put):
    script = f"import asyncio\nfrom ingest.sandbox import parse\nasyncio.run(parse({str(put(pdf.hanging()))!r}))"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", script], env=env)
    try:
        workers = await _until(lambda: psutil.Process(parent.pid).children())
    finally:
        parent.kill()
        parent.wait()
    assert await _until(lambda: not any(_works(worker) for worker in workers))


def _works(process: psutil.Process) -> bool:
    """Where nothing collects orphans, as in some containers, a dead one stays a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def _until(condition: Callable[[], Any]) -> Any:
    for _ in range(200):
        if result := condition():
            return result
        await asyncio.sleep(0.05)
    return condition()


async def test_what_a_parser_prints_never_reaches_our_output(pdf: PdfMaker, put: Put, capfd):
    broken = pdf.with_text("SECRET WORDS").replace(b"startxref\n", b"startxref\n9")
    await parse(put(broken))
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


async def test_several_at_once(pdf: PdfMaker, put: Put):
    path = put(pdf.with_text("same file"))
    documents = await asyncio.gather(*(parse(path) for _ in range(4)))
    assert {document.pages[0].text for document in documents} == {"same file"}


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, ingest.sandbox, ingest.tokenize\n"
        "heavy = {'torch', 'pypdf', 'docx', 'lxml', 'selectolax', 'pypdfium2', 'defusedxml', 'litestar'}\n"
        "heavy |= {'sqlalchemy', 'service', 'cache_store', 'zipfile'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_limits_refuse_nonsense():
    with pytest.raises(ValueError, match="above zero"):
        ParseLimits(max_pages=0)
    with pytest.raises(ValueError, match="128 MiB"):
        ParseLimits(memory_nbytes=MIB)
