"""A file to messages: its kind, its pages one by one, its warnings. Runs inside the parser process."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ingest.errors import EmptyDocument, TooManyPages
from ingest.formats.markdown import render
from ingest.formats.sections import paginate
from ingest.formats.text import read_text, split_pages, title_of
from ingest.limits import ParseLimits
from ingest.model import MediaType
from ingest.normalise import tidy
from ingest.pages import Budget, short_label, short_title
from ingest.quality import judge, measure
from ingest.sniff import SNIFF_NBYTES, sniff
from ingest.wire import Finished, Message, Opened, PageRead

_PAGED = frozenset((MediaType.DOCX, MediaType.EPUB, MediaType.HTML))


@dataclass(frozen=True, slots=True)
class _Found:
    """A document whose text is read at once. `pages` are (label, text), not tidied yet."""

    media_type: MediaType
    title: str | None
    pages: list[tuple[str | None, str]]
    warnings: tuple[str, ...]


def extract(path: Path, limits: ParseLimits, password: str | None = None) -> Iterator[Message]:
    """Opened, then PageRead for each page in order, then Finished. Raises the errors of `ingest.errors`."""
    with path.open("rb") as file:
        media_type = sniff(file.read(SNIFF_NBYTES))
    # Parsers take a while to import, so that each is imported where it is needed.
    match media_type:
        case MediaType.PDF:
            from ingest.pdf_pages import read_pdf

            yield from read_pdf(path, limits, password)
        case MediaType.DOCX | MediaType.EPUB:
            yield from _packed(path, limits)
        case MediaType.HTML:
            yield from _html(path, limits)
        case MediaType.MARKDOWN:
            yield from _markdown(path, limits)
        case MediaType.TEXT:
            yield from _text(path, limits)


def _packed(path: Path, limits: ParseLimits) -> Iterator[Message]:
    """A document in a ZIP container; its parts say which kind it is."""
    from ingest.formats.archive import open_archive

    with open_archive(path, limits) as archive:
        if archive.kind() is MediaType.EPUB:
            from ingest.formats.epub import read_epub

            book = read_epub(archive, limits)
            found = _Found(MediaType.EPUB, book.title, paginate(book.sections), book.warnings)
        else:
            from ingest.formats.word import read_word

            word = read_word(archive)
            pages = paginate(word.sections, laid_out=word.laid_out)
            found = _Found(MediaType.DOCX, word.title, pages, word.warnings)
    yield from _run_of_text(found, limits)


def _html(path: Path, limits: ParseLimits) -> Iterator[Message]:
    from ingest.formats.html import read_html_file

    page = read_html_file(path, limits)
    yield from _run_of_text(_Found(MediaType.HTML, page.title, paginate(page.sections), page.warnings), limits)


def _markdown(path: Path, limits: ParseLimits) -> Iterator[Message]:
    source, warnings = read_text(path, limits)
    title, sections = render(source)
    yield from _run_of_text(_Found(MediaType.MARKDOWN, title, paginate(sections), warnings), limits)


def _text(path: Path, limits: ParseLimits) -> Iterator[Message]:
    text, warnings = read_text(path, limits)
    pages: list[tuple[str | None, str]] = [(None, page) for page in split_pages(text)]
    yield from _run_of_text(_Found(MediaType.TEXT, title_of(text), pages, warnings), limits)


def _run_of_text(found: _Found, limits: ParseLimits) -> Iterator[Message]:
    budget = Budget(limits)
    pages = [(label, tidy(text)) for label, text in found.pages]
    if found.media_type is not MediaType.DOCX:
        # Only a Word document has pages that somebody left blank.
        pages = [(label, text) for label, text in pages if text.strip()]
    if not any(text.strip() for _, text in pages):
        raise EmptyDocument("text")
    if len(pages) > limits.max_pages and found.media_type in _PAGED:
        raise TooManyPages(len(pages), limits.max_pages)
    yield Opened(found.media_type, len(pages), short_title(found.title))
    qualities = []
    for number, (label, text) in enumerate(pages, start=1):
        budget.spend(text)
        qualities.append(measure(number, text, shows_something=False))
        yield PageRead(number, short_label(label, number), text)
    yield Finished([*found.warnings, *judge(qualities)])
