"""A PDF to messages: the text of its pages, by recognition where they are scanned."""

from collections.abc import Iterator
from pathlib import Path

from ingest.errors import DamagedFile
from ingest.formats.pdf import PdfFile, open_pdf
from ingest.limits import ParseLimits
from ingest.model import MediaType
from ingest.normalise import LineJoiner, narrow_gaps, tidy
from ingest.ocr import Recognizer, find_recognizer
from ingest.pages import Budget, short_label, short_title
from ingest.quality import PageQuality, judge, measure, name_pages
from ingest.wire import Finished, Message, Opened, PageRead
from ingest.words import some_pages


def read_pdf(path: Path, limits: ParseLimits, password: str | None) -> Iterator[Message]:
    """Opened, the pages, Finished. Raises the errors of `ingest.errors`."""
    with open_pdf(path, limits, password) as pdf:
        yield Opened(MediaType.PDF, pdf.n_pages, short_title(pdf.title))
        scans = _Scans(pdf, limits)
        yield from _pages(pdf, scans, limits)


def _pages(pdf: PdfFile, scans: "_Scans", limits: ParseLimits) -> Iterator[Message]:
    qualities: list[PageQuality] = []
    unread: list[PageQuality] = []
    in_part: list[PageQuality] = []
    joiner, budget = LineJoiner(), Budget(limits)
    for number, page in enumerate(pdf.pages(), start=1):
        raw, quality = page.text, measure(number, page.text or "", shows_something=page.shows_something)
        unusable = page.shows_something if raw is None else quality.is_scanned or quality.is_poor
        if unusable and (seen := scans.read(quality)):
            raw, quality = seen, measure(number, seen)
        if page.filled_in:
            # Of a scanned page this is a small part: it must not pass for the page's text.
            if raw is None or quality.is_scanned:
                in_part.append(quality)
            raw = f"{raw}\n\n{page.filled_in}" if raw and raw.strip() else page.filled_in
            quality = measure(number, raw)
        (qualities if raw is not None else unread).append(quality)
        text = joiner.join(narrow_gaps(tidy(raw or "")))
        budget.spend(text)
        yield PageRead(number, short_label(page.label, number), text)
    lost = [*_unread_warning(unread, pdf.n_pages), *_part_warning(in_part, pdf.n_pages)]
    yield Finished([*lost, *scans.warnings(pdf.n_pages), *judge(qualities, recognition=scans.state)])


def _unread_warning(unread: list[PageQuality], n_pages: int) -> tuple[str, ...]:
    if len(unread) == n_pages:
        raise DamagedFile("none of its pages can be read")
    if not unread:
        return ()
    return (f"{some_pages(len(unread), n_pages, 'is', 'are')} damaged and could not be read: {name_pages(unread)}.",)


def _part_warning(in_part: list[PageQuality], n_pages: int) -> tuple[str, ...]:
    if not in_part:
        return ()
    have = some_pages(len(in_part), n_pages, "has", "have")
    return (f"{have} text that could not be read, but for what was filled in: {name_pages(in_part)}.",)


class _Scans:
    """Reads pages without usable text. Looks for Tesseract when the first one comes."""

    def __init__(self, pdf: PdfFile, limits: ParseLimits) -> None:
        self._pdf = pdf
        self._limits = limits
        self._recognizer: Recognizer | None = None
        self._was_looked_for = False
        self._recognized: list[PageQuality] = []
        self._failed: list[PageQuality] = []
        self.state = "off"

    def read(self, page: PageQuality) -> str:
        """The page's text, "" when there is none to be had."""
        if not self._was_looked_for:
            self._was_looked_for = True
            self._recognizer, self.state = find_recognizer(self._limits)
        if self._recognizer is None:
            return ""
        self.state = "tried"
        picture = self._pdf.picture(page.number)
        text = self._recognizer.read(picture) if picture is not None else None
        if text is None:
            self._failed.append(page)
        elif text:
            self._recognized.append(page)
        return text or ""

    def warnings(self, n_pages: int) -> Iterator[str]:
        if self._recognized:
            read = some_pages(len(self._recognized), n_pages, "was", "were")
            yield f"{read} read by text recognition, which makes mistakes: {name_pages(self._recognized)}."
        if self._failed:
            failed = some_pages(len(self._failed), n_pages, "was", "were")
            yield f"{failed} given up by text recognition: {name_pages(self._failed)}."
        if self._recognizer is not None and self._recognizer.missing:
            yield f"Text recognition lacks the languages {', '.join(self._recognizer.missing)}."
