"""Whether a page's text is worth prefilling, judged before anything expensive happens.

Measured on the parser's raw output: a font without a character map shows as replacement characters, glyph
names, private-use or control characters, and the last of these are gone after normalisation.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ingest.errors import EmptyDocument, NoTextLayer, PoorText
from ingest.words import some_pages

_UNMAPPED = re.compile(r"\(cid:\d+\)|/(?:G|g|C|c|uni|cid|glyph|index)[0-9A-Fa-f]{1,5}(?![\w])")
_PRIVATE_USE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff]")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]")
_REPLACEMENT = re.compile("[\ufffd\ud800-\udfff]")
_SPACE = re.compile(r"\s+")

POOR_CHAR_SHARE = 0.10
"""A page is poor above this share of characters without a meaning."""
POOR_PAGE_SHARE = 0.30
"""A document is refused above this share of poor pages among those with text."""
EMPTY_PAGE_SHARE = 0.50
"""A document is refused above this share of pages that show something but have no text."""


@dataclass(frozen=True, slots=True)
class PageQuality:
    """Counts over one page's raw text; `shows_something` tells a picture of text from a blank page."""

    number: int
    n_visible: int
    n_meaningless: int
    shows_something: bool = True

    @property
    def is_empty(self) -> bool:
        return self.n_visible == 0

    @property
    def is_scanned(self) -> bool:
        return self.is_empty and self.shows_something

    @property
    def is_poor(self) -> bool:
        return self.n_meaningless > POOR_CHAR_SHARE * self.n_visible


def measure(number: int, raw: str, *, shows_something: bool = True) -> PageQuality:
    """Count what is visible, and what of it has no meaning; a glyph name counts as one character."""
    text, n_unmapped = _UNMAPPED.subn("", raw)
    n_meaningless = n_unmapped + sum(len(kind.findall(text)) for kind in (_PRIVATE_USE, _CONTROL, _REPLACEMENT))
    n_visible = len(_SPACE.sub("", text)) + n_unmapped
    return PageQuality(number, n_visible, n_meaningless, shows_something)


def judge(pages: Sequence[PageQuality], *, recognition: str = "off") -> tuple[str, ...]:
    """Warnings about the few bad pages of a usable document.

    `recognition` says for NoTextLayer what became of reading scanned pages. Raises EmptyDocument (nothing on any
    page), NoTextLayer or PoorText when most of it cannot be used.
    """
    shown = [page for page in pages if not page.is_empty or page.shows_something]
    scanned = [page for page in shown if page.is_scanned]
    with_text = [page for page in shown if not page.is_empty]
    if not shown:
        raise EmptyDocument("text" if pages else "pages")
    if len(scanned) > EMPTY_PAGE_SHARE * len(shown) or not with_text:
        raise NoTextLayer(len(scanned), len(pages), recognition)
    return _scan_warning(scanned, len(pages)) + _poor_warning(with_text, len(pages))


def _scan_warning(scanned: Sequence[PageQuality], n_pages: int) -> tuple[str, ...]:
    if not scanned:
        return ()
    without = some_pages(len(scanned), n_pages, "has", "have")
    return (f"{without} no text layer and cannot be asked about: {name_pages(scanned)}.",)


def _poor_warning(with_text: Sequence[PageQuality], n_pages: int) -> tuple[str, ...]:
    poor = [page for page in with_text if page.is_poor]
    if not poor:
        return ()
    share = 100 * sum(page.n_meaningless for page in poor) / sum(page.n_visible for page in poor)
    if len(poor) > POOR_PAGE_SHARE * len(with_text):
        raise PoorText(len(poor), n_pages, round(share, 1))
    wrong = some_pages(len(poor), n_pages, "has", "have")
    return (f"{wrong} characters that cannot be read ({share:.0f} % of their text): {name_pages(poor)}.",)


def name_pages(pages: Sequence[PageQuality], most: int = 10) -> str:
    """ "page 3", or "pages 3, 4, 9 and 12 more"."""
    numbers = [str(page.number) for page in pages[:most]]
    more = f" and {len(pages) - most} more" if len(pages) > most else ""
    return ("page " if len(pages) == 1 else "pages ") + ", ".join(numbers) + more
