"""The text of one paragraph, as Word shows it: insertions in, deletions out, fields by their results."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ingest.formats.word.names import W, chosen, is_on
from ingest.formats.word.symbols import symbol

PAGE_BREAK = "\f"
"""Stands in a paragraph's text where its author ends the page; XML text cannot hold this character."""
LAID_OUT_BREAK = "\v"
"""Where a page ended when Word last laid the document out."""
PICTURE = "\x1c"
"""A picture that stands in the line and has no description. It counts as white space, and XML cannot hold it either."""

_MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_ALTERNATIVES = "{http://schemas.openxmlformats.org/markup-compatibility/2006}AlternateContent"
_SIMPLE = {
    W + "tab": "\t",
    W + "ptab": "\t",
    W + "cr": "\n",
    W + "noBreakHyphen": "-",
    W + "lastRenderedPageBreak": LAID_OUT_BREAK,
}
_HOLDERS = frozenset(
    W + name
    for name in (
        "hyperlink", "fldSimple", "ins", "moveTo", "smartTag", "sdt", "sdtContent", "dir", "bdo", "customXml",
        "ruby", "rubyBase",
    )
)  # fmt: skip
_INLINE = "{http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing}inline"
_PICTURES = frozenset(W + name for name in ("drawing", "pict", "object"))


@dataclass(slots=True)
class Paragraph:
    """`text` with breaks in it; `notes`: (kind, id) in the order they are referred to; `boxes`: contents of text boxes;
    `n_comments` that are not read."""

    pieces: list[str] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    boxes: list[Any] = field(default_factory=list)
    n_comments: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def read_paragraph(element: Any, note_number: Callable[[str, str], int]) -> Paragraph:
    """What the ``w:p`` `element` shows. `note_number` gives the number of a note from its kind and id."""
    paragraph = Paragraph()
    _Reader(paragraph, note_number).read(element)
    return paragraph


class _Reader:
    def __init__(self, paragraph: Paragraph, note_number: Callable[[str, str], int]) -> None:
        self._paragraph = paragraph
        self._note_number = note_number

    def read(self, holder: Any) -> None:
        for element in holder:
            tag = element.tag
            if tag == W + "t":
                self._add(element.text or "")
            elif tag == W + "r":
                if not is_on(element.find(W + "rPr"), "vanish"):
                    self.read(element)
            elif tag in _SIMPLE:
                self._add(_SIMPLE[tag])
            elif tag in _HOLDERS:
                self.read(element)
            elif tag == _ALTERNATIVES:
                self.read(chosen(element))
            elif tag in _PICTURES:
                self._picture(element)
            elif isinstance(tag, str):
                self._special(tag, element)

    def _special(self, tag: str, element: Any) -> None:
        match tag.rpartition("}")[2]:
            case "br":
                self._add(PAGE_BREAK if element.get(W + "type") == "page" else "\n")
            case "sym":
                self._add(symbol(element.get(W + "font") or "", element.get(W + "char") or ""))
            case "footnoteReference" | "endnoteReference" as name:
                self._note(name.removesuffix("Reference"), element.get(W + "id") or "")
            case "commentReference":
                self._paragraph.n_comments += 1
            case "fldChar":
                self._checkbox(element)
            case "oMath" | "oMathPara":
                self._add("".join(part.text or "" for part in element.iter(_MATH + "t")))

    def _add(self, text: str) -> None:
        self._paragraph.pieces.append(text)

    def _note(self, kind: str, note_id: str) -> None:
        self._paragraph.notes.append((kind, note_id))
        self._add(f" [{self._note_number(kind, note_id)}]")

    def _checkbox(self, element: Any) -> None:
        box = element.find(f"{W}ffData/{W}checkBox")
        if box is not None:
            name = "checked" if box.find(W + "checked") is not None else "default"
            self._add("☒" if is_on(box, name) else "☐")

    def _picture(self, element: Any) -> None:
        boxes = list(_boxes(element))
        self._paragraph.boxes += boxes
        if not boxes:
            described = next((part.get("descr") for part in element.iter() if part.get("descr")), "")
            shown = PICTURE if element.find(_INLINE) is not None else ""
            self._add(f"[image: {described}]" if described else shown)


def _boxes(element: Any) -> Iterator[Any]:
    """Contents of the text boxes in a picture; those inside another one come with it."""
    for child in element:
        if child.tag == W + "txbxContent":
            yield child
        else:
            yield from _boxes(chosen(child) if child.tag == _ALTERNATIVES else child)
