"""One spelling for the same text: what is stored, shown, tokenized and cited.

Lines stay lines, because tables and headings are read from them. Nothing here changes a word's letters other
than by Unicode's canonical composition and by taking typographic ligatures apart.
"""

import re
import unicodedata

_LIGATURES = {
    0xFB00: "ff", 0xFB01: "fi", 0xFB02: "fl", 0xFB03: "ffi", 0xFB04: "ffl", 0xFB05: "st", 0xFB06: "st",
}  # fmt: skip
_SPACES = dict.fromkeys([0x09, 0x0B, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000], " ")
_LINE_ENDS = {0x0C: "\n", 0x85: "\n", 0x2028: "\n", 0x2029: "\n\n"}
# Zero-width joiner and non-joiner stay: emoji, Persian and Indic scripts are spelled with them.
_INVISIBLE = dict.fromkeys(
    [0xAD, 0x200B, 0x2060, 0xFEFF, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
)
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
del _CONTROLS[0x0A]
_TABLE = {**_CONTROLS, **_INVISIBLE, **_SPACES, **_LINE_ENDS, **_LIGATURES}

_SOFT_HYPHEN_BREAK = re.compile("\u00ad[ \t]*\n[ \t]*")
_TRAILING_SPACE = re.compile(r" +$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{3,}")
_LEADER = re.compile(r"([._·…])(?: ?\1){4,}")
_WIDE_GAP = re.compile(r"(?<=\S) {3,}")


def tidy(text: str) -> str:
    """Compose (NFC), take ligatures apart, and drop what is invisible: controls, soft hyphens, direction
    marks.

    Keeps indentation and gaps between words (they carry the columns of plain-text tables), trims line ends,
    and leaves at most one blank line in a row. Lone surrogates become U+FFFD, so the result always encodes
    as UTF-8.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    text = _SOFT_HYPHEN_BREAK.sub("", text)
    # Twice: a decomposed letter can stand across a dropped control, and NFC can give a plain space.
    text = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).translate(_TABLE))
    text = _BLANK_LINES.sub("\n\n", _TRAILING_SPACE.sub("", text))
    return text.strip("\n")


def narrow_gaps(text: str) -> str:
    """Two spaces for every wider gap inside a line, three marks for every row of dots or underscores.

    Columns and leaders of a laid-out page stay visible, and do not cost a hundred tokens each.
    """
    return _LEADER.sub(r"\1\1\1", _WIDE_GAP.sub("  ", text))


_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_BROKEN_WORD = re.compile(r"([^\W\d_]+)-\n([^\W\d_]+)([^\s-]*) ?")
# First parts that English and German keep a hyphen after.
_HYPHEN_KEEPERS = frozenset(
    (
        "self",
        "non",
        "ex",
        "all",
        "half",
        "cross",
        "well",
        "long",
        "short",
        "full",
        "part",
        "high",
        "low",
        "e",
        "x",
    )
)
_VOCABULARY_LIMIT = 200_000


class LineJoiner:
    """Puts words together that a line break has split ("agree-/ment"), learning from the pages read so far.

    A word seen whole elsewhere decides ("agreement" joins, "long-term" keeps its hyphen). Otherwise it joins
    when both parts are lower case and the first is not one that usually keeps a hyphen. Digits never join.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def join(self, text: str) -> str:
        """The text with broken words whole, on the line they began on."""
        if len(self._seen) < _VOCABULARY_LIMIT:
            self._seen.update(word.lower() for word in _WORD.findall(text))
        return _BROKEN_WORD.sub(self._whole, text)

    def _whole(self, match: re.Match[str]) -> str:
        first, second, mark = match.groups()
        hyphen = "" if self._joins(first, second) else "-"
        return f"{first}{hyphen}{second}{mark}\n"

    def _joins(self, first: str, second: str) -> bool:
        if f"{first}-{second}".lower() in self._seen:
            return False
        if f"{first}{second}".lower() in self._seen:
            return True
        return second.islower() and not first.isupper() and first.lower() not in _HYPHEN_KEEPERS
