"""Headers and footers of a Word document. They are on every page: each is said once, where its section begins."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from docx.oxml.parser import parse_xml

from ingest.formats.word.inline import read_paragraph
from ingest.formats.word.names import W, chosen, is_on

_ID = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"
_HOLDERS = frozenset(W + name for name in ("tbl", "tr", "tc", "sdt", "sdtContent", "ins", "moveTo", "customXml"))
_COUNTS_PAGES = re.compile(r"\s*(PAGE|NUMPAGES|SECTIONPAGES)\b", re.IGNORECASE)
_WORDS_OF_COUNTS = re.compile(r"\b(page|of|seite|von|blatt|p|pg)\b|[第页頁共]", re.IGNORECASE)


class Margins:
    """Texts of the header and footer `parts`, XML by the ids that sections name them with. `even_differ`: pages with
    even numbers have their own."""

    def __init__(self, parts: Mapping[str, bytes], *, even_differ: bool) -> None:
        self.n_damaged = 0
        self._parts = parts
        self._shown = {"default"} | ({"even"} if even_differ else set())
        # By kind and by the pages they are for. A section that names none goes on with those of the one before.
        self._in_use: dict[str, dict[str, str]] = {"header": {}, "footer": {}}
        self._told: set[str] = set()
        self._texts: dict[str, str] = {}

    def of(self, section: Any) -> list[str]:
        """What the ``w:sectPr`` `section` has that none before had."""
        shown = self._shown | ({"first"} if is_on(section, "titlePg") else set())
        for kind in ("header", "footer"):
            for reference in section.iterfind(f"{W}{kind}Reference"):
                self._in_use[kind][reference.get(W + "type", "default")] = reference.get(_ID, "")
        told = [
            f"[{kind.capitalize()}: {text}]"
            for kind, parts in self._in_use.items()
            for pages, part_id in parts.items()
            if pages in shown and (text := self._text(part_id))
        ]
        new = [line for line in dict.fromkeys(told) if line not in self._told]
        self._told.update(new)
        return new

    def _text(self, part_id: str) -> str:
        if part_id not in self._texts:
            self._texts[part_id] = self._read(part_id)
        return self._texts[part_id]

    def _read(self, part_id: str) -> str:
        try:
            return "\n".join(_lines(parse_xml(self._parts[part_id])))
        except KeyError:
            return ""
        except (SyntaxError, ValueError):  # what is on the pages themselves can be read all the same
            self.n_damaged += 1
            return ""


def _lines(holder: Any) -> Iterator[str]:
    for element in holder:
        if element.tag == W + "p":
            counts_pages = _drop_page_numbers(element)
            paragraph = read_paragraph(element, lambda *_: 0)
            text = " ".join(paragraph.text.split())
            if text and not (counts_pages and _is_count(text)):
                yield text
            for box in paragraph.boxes:
                yield from _lines(box)
        elif element.tag in _HOLDERS:
            yield from _lines(element)
        elif isinstance(element.tag, str) and element.tag.endswith("}AlternateContent"):
            yield from _lines(chosen(element))


def _drop_page_numbers(paragraph: Any) -> bool:
    """Take out what is another number on every page; whether there was any."""
    simple = [e for e in paragraph.iter(W + "fldSimple") if _COUNTS_PAGES.match(e.get(W + "instr", ""))]
    for element in simple:
        element.getparent().remove(element)
    results = list(_page_numbers(paragraph))
    for element in results:
        element.getparent().remove(element)
    return bool(simple or results)


def _page_numbers(paragraph: Any) -> Iterator[Any]:
    """Texts of fields that are written as marks between runs: begin, instruction, separate, result, end."""
    fields: list[tuple[str, bool]] = []
    for element in paragraph.iter(W + "fldChar", W + "instrText", W + "t"):
        kind = element.get(W + "fldCharType")
        if kind == "begin":
            fields.append(("", False))
        elif kind == "separate" and fields:
            fields[-1] = (fields[-1][0], True)
        elif kind == "end" and fields:
            fields.pop()
        elif element.tag == W + "instrText" and fields:
            fields[-1] = (fields[-1][0] + (element.text or ""), False)
        elif element.tag == W + "t" and any(is_result and _COUNTS_PAGES.match(asked) for asked, is_result in fields):
            yield element


def _is_count(text: str) -> bool:
    """Whether nothing but "Page of" is left."""
    return not any(sign.isalnum() for sign in _WORDS_OF_COUNTS.sub("", text))
