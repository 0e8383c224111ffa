"""Plain text is read in the tests' own process, by the parser's code: a process for each takes a third of a second, and
`tests/ingest`, like every file of another kind, has those."""

import asyncio
import os
from pathlib import Path

from ingest import sandbox
from ingest.extract import extract
from ingest.limits import ParseLimits
from ingest.model import Document, MediaType, Page
from ingest.sniff import SNIFF_NBYTES, sniff
from ingest.wire import Finished, Opened, PageRead

_LARGE_NBYTES = 1 << 18


async def parse(path, *, limits=None, password=None, on_progress=None, cancel=None) -> Document:
    """As `ingest.sandbox.parse`."""
    if cancel is None and _is_text(path):
        await asyncio.sleep(0)
        return _read(Path(path), limits or ParseLimits(), on_progress or (lambda *_: None))
    return await sandbox.parse(path, limits=limits, password=password, on_progress=on_progress, cancel=cancel)


def _is_text(path) -> bool:
    if not os.access(path, os.R_OK) or os.path.getsize(path) > _LARGE_NBYTES:
        return False
    with open(path, "rb") as file:
        return sniff(file.read(SNIFF_NBYTES)) in (MediaType.TEXT, MediaType.MARKDOWN)


def _read(path: Path, limits: ParseLimits, on_progress) -> Document:
    pages: list[Page] = []
    for message in extract(path, limits):
        match message:
            case Opened() as opened:
                on_progress(0, opened.n_pages)
            case PageRead(number, label, text):
                pages.append(Page(number, label, text))
                on_progress(len(pages), opened.n_pages)
            case Finished(warnings):
                return Document(opened.media_type, tuple(pages), opened.title, tuple(warnings))
    raise AssertionError
