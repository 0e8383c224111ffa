"""A Word document's body as sections: paragraphs, headings, lists, tables and notes in the order of the text."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from docx.document import Document

from ingest.errors import DamagedFile
from ingest.formats.archive import Archive
from ingest.formats.sections import Section, first_heading
from ingest.formats.tables import repeated, table_text, whole
from ingest.formats.word.inline import LAID_OUT_BREAK, PAGE_BREAK, PICTURE, Paragraph, read_paragraph
from ingest.formats.word.margins import Margins
from ingest.formats.word.names import W, chosen, is_on, value
from ingest.formats.word.notes import read_notes
from ingest.formats.word.numbering import MAX_DEPTH, Numbering
from ingest.formats.word.package import open_word
from ingest.formats.word.styles import Style, Styles
from ingest.words import counted

_NO_TITLES = frozenset(("", "word document", "untitled", "document"))
_BREAKS = re.compile(f"([{PAGE_BREAK}{LAID_OUT_BREAK}])")
_CONTINUOUS = frozenset(("continuous", "nextColumn"))
_NEW_PAGE = "nextPage"
_WRAPPERS = frozenset(W + name for name in ("sdt", "sdtContent", "ins", "moveTo", "customXml", "smartTag"))
_MOST_SPANNED = 60


@dataclass(frozen=True, slots=True)
class WordText:
    """`laid_out`: its page breaks are those of Word's own layout."""

    title: str | None
    sections: list[Section]
    laid_out: bool
    warnings: tuple[str, ...]


def read_word(archive: Archive) -> WordText:
    """All text of the document. Raises what `open_word` raises."""
    opened = open_word(archive)
    document = opened.document
    try:
        body = _Body(document, Margins(opened.margins, even_differ=opened.even_differ))
        body.read(document.element.body)
        title = (document.core_properties.title or "").strip()
    except (MemoryError, RecursionError):
        raise
    except Exception:
        # Notes, numbering and properties are parsed when they are asked for, and elements may not be what they should.
        raise DamagedFile("its text cannot be read as a Word document") from None
    if title.lower() in _NO_TITLES:
        title = first_heading(body.sections)
    return WordText(title or None, body.sections, body.laid_out, tuple(body.warnings()))


class _Body:
    """Collects sections, and knows whether the next one begins a page."""

    def __init__(self, document: Document, margins: Margins) -> None:
        self.sections: list[Section] = []
        self.laid_out = next(document.element.body.iter(W + "lastRenderedPageBreak"), None) is not None
        self._styles = Styles(document)
        self._numbering = Numbering(document)
        self._notes = {kind: read_notes(document, kind) for kind in ("footnote", "endnote")}
        self._note_numbers: dict[str, dict[str, int]] = {"footnote": {}, "endnote": {}}
        self._margins = margins
        self._word_sections = _word_sections(document.element.body)
        self._new_margins: list[str] = []
        self._next_section()
        self._n_comments = 0
        self._n_included = 0
        self._starts_page = True
        self._page_shows = False
        self._in_list = False

    def warnings(self) -> Iterable[str]:
        if self._n_comments:
            yield f"{counted(self._n_comments, 'comment')} in the margin cannot be asked about."
        if self._n_included:
            yield f"{counted(self._n_included, 'file')} inside the document cannot be asked about."
        if self._margins.n_damaged:
            yield f"{counted(self._margins.n_damaged, 'header or footer')} could not be read."

    def read(self, holder: Any) -> None:
        for element in holder:
            if element.tag == W + "p":
                self._paragraph(element)
            elif element.tag == W + "tbl":
                self._table(element)
            elif element.tag in _WRAPPERS:
                self.read(element)
            elif element.tag == W + "altChunk":
                self._n_included += 1
            elif isinstance(element.tag, str) and element.tag.endswith("}AlternateContent"):
                self.read(chosen(element))

    def _paragraph(self, element: Any) -> None:
        properties = element.find(W + "pPr")
        style = self._styles.of(value(properties, "pStyle"))
        if style.starts_page or is_on(properties, "pageBreakBefore"):
            self._end_page()
        paragraph = self._read(element)
        mark = self._mark(properties, style)
        prefix = f"{'#' * style.level} " if style.level and paragraph.text.strip() else ""
        self._emit(paragraph.text, style.level, prefix, mark)
        self._beside(paragraph)
        ends_section = properties is not None and properties.find(W + "sectPr") is not None
        # How the next section begins, that one says.
        if ends_section and self._next_section() not in _CONTINUOUS:
            self._end_page()

    def _next_section(self) -> str:
        """How it begins. Its headers and footers follow its first text: that may be the heading by which a page is
        known."""
        section = next(self._word_sections, None)
        if section is None:
            return _NEW_PAGE
        self._new_margins += self._margins.of(section)
        return value(section, "type") or _NEW_PAGE

    def _read(self, element: Any) -> Paragraph:
        paragraph = read_paragraph(element, self._note_number)
        self._n_comments += paragraph.n_comments
        return paragraph

    def _note_number(self, kind: str, note_id: str) -> int:
        numbers = self._note_numbers[kind]
        return numbers.setdefault(note_id, len(numbers) + 1)

    def _mark(self, properties: Any, style: Style) -> str:
        """The paragraph's number with its indentation, "" outside of lists, and where its end was deleted: it is none
        of its own then."""
        own_mark = properties.find(W + "rPr") if properties is not None else None
        if is_on(own_mark, "del") or is_on(own_mark, "moveFrom"):
            return ""
        num_id = value(properties, "numPr", "numId") or style.num_id
        if num_id in (None, "0"):
            return ""
        own = value(properties, "numPr", "ilvl")
        depth = min(whole(own, 0) if own is not None else style.depth or 0, MAX_DEPTH)
        mark = self._numbering.mark(num_id, max(0, depth))
        return f"{'' if style.level else '  ' * depth}{mark} " if mark else ""

    def _emit(self, text: str, level: int, prefix: str, mark: str) -> None:
        """One paragraph, which may go on over pages."""
        is_item = bool(mark) and not level
        for part in _BREAKS.split(text):
            if part == PAGE_BREAK:
                self._break()
            elif part == LAID_OUT_BREAK:
                self._end_page()
            elif part.strip():
                line = f"{prefix}{mark}{' '.join(part.split()) if level else part.strip()}"
                self._add(Section(line, level, tight=is_item and self._in_list))
                prefix, mark, level, self._in_list = "", "", 0, is_item
            if PICTURE in part:
                self._page_shows = True

    def _add(self, section: Section) -> None:
        self.sections.append(Section(section.text, section.level, self._starts_page, section.tight))
        self._starts_page, self._page_shows, self._in_list = False, True, False
        self.sections += [Section(line) for line in self._new_margins]
        self._new_margins = []

    def _break(self) -> None:
        """The page ends here, also one without text."""
        if self._starts_page:
            self.sections.append(Section("", starts_page=True))
        self._starts_page, self._page_shows = True, False

    def _end_page(self) -> None:
        """The page ends here, unless it has just begun."""
        if self._page_shows:
            self._break()

    def _beside(self, paragraph: Paragraph) -> None:
        """Text boxes and notes follow what they belong to."""
        for box in paragraph.boxes:
            self.read(box)
        for kind, note_id in paragraph.notes:
            text = self._notes[kind].pop(note_id, None)
            if text:
                self._add(Section(f"[{kind.capitalize()} {self._note_numbers[kind][note_id]}: {text}]"))

    def _table(self, table: Any) -> None:
        rows = list(_rows(table))
        if all(len(row) <= 1 for row in rows):
            # One column is a frame around text.
            for cell in (cell for row in rows for cell in row):
                self.read(cell)
            return
        beside = Paragraph()
        lines: list[list[str]] = []
        above: dict[int, str] = {}
        for row in rows:
            cells = self._cells(row, beside, above)
            if any(LAID_OUT_BREAK in cell or PAGE_BREAK in cell for cell in cells):
                self._lines(lines)
                self._end_page()
                lines = []
            lines.append([_BREAKS.sub(" ", cell) for cell in cells])
            if any(PICTURE in cell for cell in cells):
                self._page_shows = True
        self._lines(lines)
        self._beside(beside)

    def _lines(self, rows: list[list[str]]) -> None:
        if text := table_text(rows):
            self._add(Section(text))

    def _cells(self, row: list[Any], beside: Paragraph, above: dict[int, str]) -> list[str]:
        """The row's texts by column. `above` holds what spans down into it, and is kept for the next row."""
        texts: list[str] = []
        for cell in row:
            properties = cell.find(W + "tcPr")
            merged = properties.find(W + "vMerge") if properties is not None else None
            goes_on = merged is not None and merged.get(W + "val") != "restart"
            text = repeated(above.get(len(texts), "")) if goes_on else self._cell(cell, beside)
            if not goes_on:
                above[len(texts)] = text
            span = min(max(1, whole(value(properties, "gridSpan"), 1)), _MOST_SPANNED)
            texts += [text] + [""] * (span - 1)
        return texts

    def _cell(self, cell: Any, beside: Paragraph) -> str:
        """A cell on one line; a table inside it, cell by cell."""
        parts: list[str] = []
        for element in cell.iter(W + "p"):
            if element.getparent().tag == W + "txbxContent":
                continue  # it comes with its box
            paragraph = self._read(element)
            properties = element.find(W + "pPr")
            parts.append(self._mark(properties, self._styles.of(value(properties, "pStyle"))).lstrip() + paragraph.text)
            beside.notes += paragraph.notes
            beside.boxes += paragraph.boxes
        return " ".join(part for part in parts if part.strip())


def _word_sections(body: Any) -> Iterator[Any]:
    """What describes each of the document's sections, in their order."""
    return (part for part in body.iter(W + "sectPr") if part.getparent().tag in (W + "pPr", W + "body"))


def _rows(table: Any) -> Iterable[list[Any]]:
    """The cells of each row that was not deleted, also those inside content controls."""
    for row in _children(table, W + "tr"):
        properties = row.find(W + "trPr")
        if properties is None or properties.find(W + "del") is None:
            yield list(_children(row, W + "tc"))


def _children(holder: Any, tag: str) -> Iterable[Any]:
    for child in holder:
        if child.tag == tag:
            yield child
        elif child.tag in _WRAPPERS:
            yield from _children(child, tag)
