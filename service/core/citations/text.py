"""Splitting text into units of comparison (words, numbers, single characters of unspaced scripts) and
sentences."""

import re
import unicodedata
from collections.abc import Iterator

# Scripts written without blanks between words: each character is a unit, and pairs of them carry the meaning.
_UNSPACED = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\u1780-\u17ff"  # Myanmar, Khmer
    "\u3040-\u30ff\u31f0-\u31ff"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Han
    "\U00020000-\U0003ffff"  # Han extensions
)
_UNIT = re.compile(rf"\d(?:[\d.,'’]*\d)?|[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+")
_SEPARATORS = str.maketrans("", "", ".,'’")
_FULL_STOP = re.compile(r"[.!?]+[)\]\"'”’»]*(?=\s|$)|[。！？｡]+[)\]\"'”’」』）]*|\n\s*\n")
_ABBREVIATION = re.compile(
    r"(?:^|\n)\s*\d{1,3}$|(?:^|[\s(\"“])(?:[^\W\d_]|Mrs?|Ms|Dr|Prof|St|Nos?|Art|Sec|Sect|Para|Fig|Tab|Vol|Ch|pp?|cf|vs|etc|approx|"
    r"Inc|Ltd|Co|Corp|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec|e\.g|i\.e|Nr|Abs|bzw|ca|vgl|usw)$",
    re.IGNORECASE,
)
MAX_SENTENCE_CHARS = 400
"""Longer runs without an end (tables, lists) are cut at line ends or blanks, so that a quote stays
readable."""


def units(text: str) -> Iterator[tuple[str, int, int]]:
    """Units of `text` with their character range in it, in order.

    Words are case-folded and compatibility-normalized, numbers lose their separators (``4,200`` equals
    ``4200``).
    """
    for match in _UNIT.finditer(text):
        unit = match.group()
        if unit[0].isdigit():
            unit = unit.translate(_SEPARATORS)
        elif not unit.isascii():
            unit = unicodedata.normalize("NFKC", unit)
        yield unit.casefold(), match.start(), match.end()


def sentences(text: str) -> list[tuple[int, int]]:
    """Character ranges of the sentences of `text`, without surrounding white space, in order.

    A line end inside a paragraph is not an end (PDF text is wrapped); a short line without a full stop is
    (headings, table rows).
    """
    ends = sorted({*_full_stops(text), *_short_lines(text), len(text)})
    ranges: list[tuple[int, int]] = []
    start = 0
    for end in ends:
        ranges.extend(_cut(text, start, end))
        start = end
    return ranges


def _full_stops(text: str) -> Iterator[int]:
    for match in _FULL_STOP.finditer(text):
        if text[match.start()] != "." or not _ABBREVIATION.search(text, max(0, match.start() - 12), match.start()):
            yield match.end()


def _short_lines(text: str) -> Iterator[int]:
    """Line ends after a line clearly shorter than the page's usual width."""
    lines = text.split("\n")
    widths = sorted(len(line) for line in lines if line.strip())
    usual = widths[len(widths) * 9 // 10] if widths else 0
    position = 0
    for line in lines[:-1]:
        position += len(line) + 1
        if len(line) < 0.6 * usual:
            yield position


def _cut(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    while True:
        while start < end and text[start].isspace():
            start += 1
        while end > start and text[end - 1].isspace():
            end -= 1
        if start == end:
            return
        if end - start <= MAX_SENTENCE_CHARS:
            yield start, end
            return
        middle = _cut_point(text, start, start + MAX_SENTENCE_CHARS)
        yield start, len(text[:middle].rstrip()) if text[middle - 1].isspace() else middle
        start = middle


def _cut_point(text: str, start: int, limit: int) -> int:
    """Where to cut: after the last line end, else clause mark, else blank before `limit`, else at `limit`."""
    for marks in ("\n", ";；", ",，、", " \t"):
        found = max(text.rfind(mark, start + MAX_SENTENCE_CHARS // 4, limit) for mark in marks)
        if found > start:
            return found + 1
    return limit
