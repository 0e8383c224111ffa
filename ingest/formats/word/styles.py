"""What styles say about paragraphs: headings, list numbers, page breaks."""

import re
from dataclasses import dataclass, replace
from typing import Any

from docx.document import Document

from ingest.formats.tables import whole
from ingest.formats.word.names import W, is_on, value

_HEADING = re.compile(r"heading ([1-9])$")
_MOST_PARENTS = 20


@dataclass(frozen=True, slots=True)
class Style:
    """`level` is 1-6 for headings, else 0; `num_id` and `depth` name a list where the style numbers its paragraphs."""

    level: int = 0
    num_id: str | None = None
    depth: int | None = None
    starts_page: bool = False


class Styles:
    """The document's paragraph styles by their ids."""

    def __init__(self, document: Document) -> None:
        self._elements = {style.style_id: style.element for style in document.styles}
        self._known: dict[str, Style] = {}

    def of(self, style_id: str | None) -> Style:
        """The style with this id, with what it inherits; a plain one for an id that there is not."""
        if style_id is None:
            return Style()
        if style_id not in self._known:
            self._known[style_id] = self._inherited(style_id)
        return self._known[style_id]

    def _inherited(self, style_id: str) -> Style:
        style, current = Style(), style_id
        for _ in range(_MOST_PARENTS):
            element = self._elements.get(current)
            if element is None:
                break
            style = _filled(style, _own(element))
            parent = value(element, "basedOn")
            if parent is None:
                break
            current = parent
        return style


def _own(element: Any) -> Style:
    name = (value(element, "name") or "").lower()
    heading = _HEADING.match(name)
    level = int(heading[1]) if heading else 1 if name == "title" else 0
    outline = whole(value(element, "pPr", "outlineLvl"), 9) + 1
    depth = value(element, "pPr", "numPr", "ilvl")
    return Style(
        level=min(level or (outline if outline < 9 else 0), 6),
        num_id=value(element, "pPr", "numPr", "numId"),
        depth=whole(depth, 0) if depth is not None else None,
        starts_page=is_on(element.find(W + "pPr"), "pageBreakBefore"),
    )


def _filled(style: Style, parent: Style) -> Style:
    return replace(
        style,
        level=style.level or parent.level,
        num_id=style.num_id if style.num_id is not None else parent.num_id,
        depth=style.depth if style.depth is not None else parent.depth,
        starts_page=style.starts_page or parent.starts_page,
    )
