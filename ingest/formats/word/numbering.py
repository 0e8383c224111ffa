"""The numbers that Word puts before paragraphs: "2.1", "(a)", a bullet. They are counted, not written in the text."""

import re
from collections import defaultdict
from typing import Any

from docx.document import Document
from docx.opc.constants import RELATIONSHIP_TYPE
from docx.oxml.parser import parse_xml

from ingest.formats.tables import whole
from ingest.formats.word.names import W, is_on, value

_PLACE = re.compile(r"%([1-9])")
_ROMAN = (
    (1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"),
    (50, "l"), (40, "xl"), (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i"),
)  # fmt: skip
_MOST_ROMAN = 4_000
MAX_DEPTH = 8


class Numbering:
    """Counts through the document's lists; call `mark` for each numbered paragraph, in the order of the text."""

    def __init__(self, document: Document) -> None:
        self._levels: dict[str, dict[int, Any]] = {}
        self._list_of: dict[str, str] = {}
        self._restarts: dict[str, dict[int, int]] = {}
        self._counts: dict[str, dict[int, int]] = defaultdict(dict)
        self._started: set[str] = set()
        for relation in document.part.rels.values():
            if relation.reltype == RELATIONSHIP_TYPE.NUMBERING:
                self._read(parse_xml(relation.target_part.blob))

    def _read(self, root: Any) -> None:
        styled: dict[str, str] = {}
        linked: dict[str, str] = {}
        for abstract in root.iterfind(W + "abstractNum"):
            name = abstract.get(W + "abstractNumId", "")
            self._levels[name] = {whole(level.get(W + "ilvl"), 0): level for level in abstract.iterfind(W + "lvl")}
            if (style := value(abstract, "styleLink")) is not None:
                styled[style] = name
            if (style := value(abstract, "numStyleLink")) is not None:
                linked[name] = style
        for num in root.iterfind(W + "num"):
            num_id = num.get(W + "numId", "")
            name = value(num, "abstractNumId") or ""
            # A list that has the levels of a list style is one with it.
            self._list_of[num_id] = styled.get(linked.get(name, ""), name)
            overrides = {
                whole(part.get(W + "ilvl"), 0): value(part, "startOverride") for part in num.iterfind(W + "lvlOverride")
            }
            self._restarts[num_id] = {depth: whole(at, 1) for depth, at in overrides.items() if at is not None}

    def mark(self, num_id: str, depth: int) -> str | None:
        """What stands before this paragraph, "-" for bullets; None when it is in no list that there is."""
        name = self._list_of.get(num_id)
        levels = self._levels.get(name or "", {})
        if name is None or depth not in levels:
            return None
        counts = self._counts[name]
        self._count(counts, levels, num_id, depth)
        if value(levels[depth], "numFmt") == "bullet":
            return "-"
        pattern, is_legal = value(levels[depth], "lvlText") or "", is_on(levels[depth], "isLgl")

        def number(place: re.Match[str]) -> str:
            return self._number(counts, levels, int(place[1]) - 1, is_legal=is_legal)

        return _PLACE.sub(number, pattern).strip()

    def _count(self, counts: dict[int, int], levels: dict[int, Any], num_id: str, depth: int) -> None:
        if num_id not in self._started:
            self._started.add(num_id)
            for restarted in self._restarts.get(num_id, ()):
                counts.pop(restarted, None)
        start = self._restarts.get(num_id, {}).get(depth, whole(value(levels[depth], "start"), 1))
        counts[depth] = counts[depth] + 1 if depth in counts else start
        for deeper in [other for other in counts if other > depth]:
            # Counted from 1: the deepest level that lets it begin anew, 0 for none. Clauses may go on through articles.
            if depth < whole(value(levels.get(deeper), "lvlRestart"), deeper):
                del counts[deeper]

    @staticmethod
    def _number(counts: dict[int, int], levels: dict[int, Any], depth: int, *, is_legal: bool) -> str:
        level = levels.get(depth)
        count = counts.get(depth, whole(value(level, "start"), 1))
        form = value(level, "numFmt") or "decimal"
        # "Section 2.01" of "Article II".
        return written(count, "decimal" if is_legal and form not in ("decimalZero", "none") else form)


def written(count: int, form: str) -> str:
    """A number as Word's format `form` has it; in plain digits for forms of which we know nothing."""
    match form:
        case "none":
            return ""
        case "lowerLetter" | "upperLetter" if 0 < count <= 26 * 30:
            # After z come aa, bb, cc.
            letters = chr(ord("a") + (count - 1) % 26) * ((count - 1) // 26 + 1)
            return letters.upper() if form == "upperLetter" else letters
        case "lowerRoman" | "upperRoman" if 0 < count < _MOST_ROMAN:
            return _roman(count).upper() if form == "upperRoman" else _roman(count)
        case "decimalZero":
            return f"{count:02d}"
    return str(count)


def _roman(count: int) -> str:
    text = ""
    for size, letters in _ROMAN:
        text += letters * (count // size)
        count %= size
    return text
