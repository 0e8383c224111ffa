"""Plain text: any encoding, and pages of about 3,000 characters cut where a paragraph ends."""

import re
from pathlib import Path

from ingest.encoding import decode
from ingest.errors import EmptyDocument, TextTooLong, UnsupportedType
from ingest.limits import ParseLimits

PAGE_CHARS = 3_000
_CUTS = (re.compile(r"\n[ \t]*\n"), re.compile(r"\n"), re.compile(r"(?<=[.!?。！？])\s*"), re.compile(r"\s+"))


def read_text(path: Path, limits: ParseLimits) -> tuple[str, tuple[str, ...]]:
    """A file's decoded text, zero bytes dropped, and warnings about what decoding lost or guessed.

    Raises EmptyDocument, TextTooLong and UnsupportedType (no encoding makes text of it).
    """
    # Four bytes a character at most: a longer file cannot be within the limit in any encoding.
    if path.stat().st_size > 4 * limits.text_nbytes:
        raise TextTooLong(limits.text_nbytes)
    decoded = decode(path.read_bytes())
    if decoded is None:
        raise UnsupportedType("binary data")
    if not decoded.text.strip("\0 \t\r\n\f\ufeff"):
        raise EmptyDocument("text")
    warnings = [decoded.warning] if decoded.warning else []
    if n_zeros := decoded.text.count("\0"):
        warnings.append(f"{n_zeros:,} NUL characters were removed.")
    return decoded.text.replace("\0", ""), tuple(warnings)


def split_pages(text: str, most: int = PAGE_CHARS) -> list[str]:
    """Cut text into pages: at form feeds, and within those at the last paragraph end before `most` characters.

    A paragraph longer than a page is cut at a line, a sentence or a word, and only without any of these
    anywhere.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return [page for part in text.split("\f") if part.strip() for page in _cut(part, most)]


def _cut(text: str, most: int) -> list[str]:
    pages, start = [], 0
    while len(text) - start > most:
        end = _cut_point(text, start, most)
        pages.append(text[start:end])
        start = end
    return [page for page in [*pages, text[start:]] if page.strip()]


def _cut_point(text: str, start: int, most: int) -> int:
    for boundary in _CUTS:
        ends = [match.end() for match in boundary.finditer(text, start + most // 2, start + most)]
        ends = [end for end in ends if end > start]
        if ends:
            return ends[-1]
    return start + most


def title_of(text: str) -> str | None:
    """The first line, when it reads like a title: short, and set apart by an empty line."""
    first, _, rest = text.lstrip().partition("\n")
    alone = not rest.strip() or rest.startswith(("\n", " \n"))
    return first.strip() if alone and 0 < len(first.strip()) <= 120 else None
