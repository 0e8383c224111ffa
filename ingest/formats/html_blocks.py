"""From elements that open and close to blocks of text: paragraphs, headings, lists, tables, code."""

import re
from collections.abc import Mapping

from ingest.formats.html_tables import HtmlTable
from ingest.formats.sections import Section
from ingest.formats.tables import whole

_BLOCKS = frozenset(
    (
        "address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "details", "dialog", "div",
        "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "header", "hgroup", "legend", "li", "main",
        "menu", "nav", "ol", "option", "p", "pre", "section", "summary", "ul", "h1", "h2", "h3", "h4", "h5", "h6", "hr",
    )
)  # fmt: skip
_SPACE = re.compile(r"[ \t\n\r\f]+")
_LETTERS = re.compile(r"[^\W_]")
_MOST_INDENTED = 8


class Blocks:
    """Fed with what is entered, left and said; `finished` gives the sections."""

    def __init__(self) -> None:
        self._sections: list[Section] = []
        self._said: list[str] = []
        self._lists: list[int | None] = []
        self._n_quotes = 0
        self._n_pre = 0
        self._mark = ""
        self._was_item = False
        self._tables: list[HtmlTable] = []

    def add_text(self, text: str) -> None:
        self._said.append(text if self._n_pre else _SPACE.sub(" ", text))

    def enter(self, tag: str, attributes: Mapping[str, str | None]) -> None:
        if tag in _BLOCKS:
            self._end_block()
        match tag:
            case "ul" | "menu":
                self._lists.append(None)
            case "ol":
                self._lists.append(whole(attributes.get("start"), 1) - 1)
            case "li":
                self._begin_item(attributes)
            case "blockquote":
                self._n_quotes += 1
            case "pre":
                self._n_pre += 1
            case "br":
                self._said.append("\n")
            case "hr":
                self._put("---")
            case "img":
                alt = (attributes.get("alt") or "").strip()
                self._said.append(f"[image: {alt}]" if _LETTERS.search(alt) else "")
            case "input":
                self._said.append(_entered(attributes))
            case "q":
                self._said.append("“")
            case "table":
                self._begin_table()
            case "tr" | "td" | "th":
                self._end_block()
                if self._tables:
                    self._tables[-1].enter(tag, attributes)

    def leave(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._end_block(int(tag[1]) if len(tag) == 2 and tag[1].isdigit() else 0)
        match tag:
            case "ul" | "ol" | "menu":
                if self._lists:
                    self._lists.pop()
                self._was_item = bool(self._lists)
            case "blockquote":
                self._n_quotes = max(0, self._n_quotes - 1)
            case "pre":
                self._n_pre = max(0, self._n_pre - 1)
            case "q":
                self._said.append("”")
            case "table":
                self._end_table()
            case "tr" | "td" | "th":
                self._end_block()
                if self._tables:
                    self._tables[-1].leave(tag)

    def finished(self) -> list[Section]:
        self._end_block()
        return self._sections

    def _begin_item(self, attributes: Mapping[str, str | None]) -> None:
        count = self._lists[-1] if self._lists else None
        if count is None:
            self._mark = "- "
            return
        self._lists[-1] = whole(attributes.get("value"), count + 1)
        self._mark = f"{self._lists[-1]}. "

    def _end_block(self, level: int = 0) -> None:
        """What was said since the last block is one of its own."""
        said, self._said = "".join(self._said), []
        if self._n_pre:
            if said.strip():
                self._put("```\n" + said.strip("\n") + "\n```")
            return
        lines = [" ".join(line.split(" ")).strip() for line in said.split("\n")]
        text = "\n".join(line for line in (_SPACE.sub(" ", line) for line in lines) if line)
        if text:
            self._put(text, level)

    def _put(self, text: str, level: int = 0) -> None:
        if self._tables and self._tables[-1].cell is not None:
            self._tables[-1].cell.append(self._mark + text)
            self._mark = ""
        elif level:
            self._sections.append(Section(f"{'#' * level} {' '.join(text.split())}", level))
            self._was_item = False
        else:
            self._put_lines(text.split("\n"))

    def _put_lines(self, lines: list[str]) -> None:
        depth = min(max(0, len(self._lists) - 1), _MOST_INDENTED)
        indent = "  " * depth + ("" if self._mark or not self._lists else "  ")
        before = "> " * min(self._n_quotes, _MOST_INDENTED) + indent
        rest = before + " " * len(self._mark)
        body = "\n".join([f"{before}{self._mark}{lines[0]}", *(rest + line for line in lines[1:])])
        is_item = bool(self._lists)
        self._sections.append(Section(body, tight=is_item and self._was_item))
        self._mark, self._was_item = "", is_item

    def _begin_table(self) -> None:
        self._end_block()
        if self._tables and not self._tables[-1].is_layout:
            # A table around a table is there for the layout: its cells are blocks, in their order.
            outer = self._tables[-1]
            so_far, cell = outer.become_layout()
            self._put_table(so_far)
            for text in cell:
                self._put(text)
        self._tables.append(HtmlTable())

    def _end_table(self) -> None:
        self._end_block()
        if self._tables:
            self._put_table(self._tables.pop().text())

    def _put_table(self, text: str) -> None:
        if text:
            self._sections.append(Section(text))
            self._was_item = False


def _entered(attributes: Mapping[str, str | None]) -> str:
    """What stands in a field of a form."""
    match (attributes.get("type") or "text").lower():
        case "checkbox" | "radio":
            return "☒ " if "checked" in attributes else "☐ "
        case "text" | "email" | "tel" | "url" | "number" | "date" | "search":
            return f" {attributes.get('value') or ''} "
    return ""
