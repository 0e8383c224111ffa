"""A file to messages: its kind, its pages one by one, its warnings. Runs inside the parser process."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.errors import DamagedFile, EmptyDocument, TextTooLong
from ingest.formats.markdown import paginate, render
from ingest.formats.text import read_text, split_pages, title_of
from ingest.limits import ParseLimits
from ingest.model import MediaType
from ingest.normalise import LineJoiner, narrow_gaps, tidy
from ingest.quality import PageQuality, judge, measure, name_pages
from ingest.sniff import SNIFF_NBYTES, sniff
from ingest.wire import Finished, Message, Opened, PageRead
from ingest.words import some_pages

if TYPE_CHECKING:
    from ingest.formats.pdf import PdfFile

MAX_TITLE_CHARS = 200
_MAX_LABEL_CHARS = 80


def extract(path: Path, limits: ParseLimits, password: str | None = None) -> Iterator[Message]:
    """Opened, then PageRead for each page in order, then Finished. Raises the errors of `ingest.errors`."""
    with path.open("rb") as file:
        media_type = sniff(file.read(SNIFF_NBYTES))
    match media_type:
        case MediaType.PDF:
            yield from _pdf(path, limits, password)
        case MediaType.MARKDOWN:
            yield from _markdown(path, limits)
        case MediaType.TEXT:
            yield from _text(path, limits)


class _Budget:
    """Counts the document's text against its limit."""

    def __init__(self, limits: ParseLimits) -> None:
        self._limit = self._left = limits.text_nbytes

    def spend(self, text: str) -> None:
        self._left -= len(text.encode())
        if self._left < 0:
            raise TextTooLong(self._limit)


def _pdf(path: Path, limits: ParseLimits, password: str | None) -> Iterator[Message]:
    from ingest.formats.pdf import open_pdf  # pypdf is slow to import, and only PDFs need it

    with open_pdf(path, limits, password) as pdf:
        yield Opened(MediaType.PDF, pdf.n_pages, _title(pdf.title))
        yield from _pdf_pages(pdf, limits)


def _pdf_pages(pdf: "PdfFile", limits: ParseLimits) -> Iterator[Message]:
    qualities: list[PageQuality] = []
    unread: list[PageQuality] = []
    joiner, budget = LineJoiner(), _Budget(limits)
    for number, page in enumerate(pdf.pages(), start=1):
        quality = measure(number, page.text or "", shows_something=page.shows_something)
        (qualities if page.text is not None else unread).append(quality)
        text = joiner.join(narrow_gaps(tidy(page.text or "")))
        budget.spend(text)
        yield PageRead(number, _label(page.label, number), text)
    yield Finished([*_unread_warning(unread, pdf.n_pages), *judge(qualities)])


def _unread_warning(unread: list[PageQuality], n_pages: int) -> tuple[str, ...]:
    if len(unread) == n_pages:
        raise DamagedFile("none of its pages can be read")
    if not unread:
        return ()
    return (f"{some_pages(len(unread), n_pages, 'is', 'are')} damaged and could not be read: {name_pages(unread)}.",)


def _markdown(path: Path, limits: ParseLimits) -> Iterator[Message]:
    source, warnings = read_text(path, limits)
    title, sections = render(source)
    yield from _run_of_text(MediaType.MARKDOWN, title, paginate(sections), warnings, limits)


def _text(path: Path, limits: ParseLimits) -> Iterator[Message]:
    text, warnings = read_text(path, limits)
    pages = [(None, page) for page in split_pages(text)]
    yield from _run_of_text(MediaType.TEXT, title_of(text), pages, warnings, limits)


def _run_of_text(
    media_type: MediaType,
    title: str | None,
    pages: list[tuple[None, str]] | list[tuple[str | None, str]],
    warnings: tuple[str, ...],
    limits: ParseLimits,
) -> Iterator[Message]:
    budget = _Budget(limits)
    tidied = [(label, tidy(text)) for label, text in pages]
    kept = [(label, text) for label, text in tidied if text.strip()]
    if not kept:
        raise EmptyDocument("text")
    yield Opened(media_type, len(kept), _title(title))
    qualities = []
    for number, (label, text) in enumerate(kept, start=1):
        budget.spend(text)
        qualities.append(measure(number, text))
        yield PageRead(number, _label(label, number), text)
    yield Finished([*warnings, *judge(qualities)])


def _title(title: str | None) -> str | None:
    return (" ".join(tidy(title).split())[:MAX_TITLE_CHARS] or None) if title else None


def _label(label: str | None, number: int) -> str | None:
    short = " ".join(tidy(label).split())[:_MAX_LABEL_CHARS] if label else ""
    return short if short and short != str(number) else None
