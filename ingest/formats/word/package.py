"""The parts of a Word document that hold its text, as a package that python-docx opens.

python-docx reads every part that is referred to, pictures and embedded files too, gives up at a reference that leads
nowhere, and does not know the names of the "strict" variant. So it is given a copy with the text's parts only.
"""

import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

import docx
from docx.document import Document

from ingest.errors import DamagedFile, HasMacros
from ingest.formats.archive import Archive, resolve
from ingest.formats.xml import parse_small, refuse_declarations

_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_STRICT = (
    (
        b"http://purl.oclc.org/ooxml/wordprocessingml/main",
        b"http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    ),
    (b"http://purl.oclc.org/ooxml/officeDocument/relationships", _OFFICE.encode()),
    (b"http://purl.oclc.org/ooxml/officeDocument/math", b"http://schemas.openxmlformats.org/officeDocument/2006/math"),
    (b"http://purl.oclc.org/ooxml/drawingml/", b"http://schemas.openxmlformats.org/drawingml/2006/"),
)
_CORE = "http://schemas.openxmlformats.org/package/2006/relationships/metadata/core-properties"
_TYPE = "application/vnd.openxmlformats-officedocument.wordprocessingml."
_TYPES = {
    "document": _TYPE + "document.main+xml",
    "styles": _TYPE + "styles+xml",
    "numbering": _TYPE + "numbering+xml",
    "footnotes": _TYPE + "footnotes+xml",
    "endnotes": _TYPE + "endnotes+xml",
    "core-properties": "application/vnd.openxmlformats-package.core-properties+xml",
}
_OPTIONAL = ("styles", "numbering", "footnotes", "endnotes")
_MARGINS = ("header", "footer")


@dataclass(frozen=True, slots=True)
class Opened:
    """`document` has text, styles, numbering and notes; `margins`: headers and footers, XML by the ids with which its
    sections name them. `even_differ`: even pages have their own."""

    document: Document
    margins: dict[str, bytes]
    even_differ: bool


def open_word(archive: Archive) -> Opened:
    """Raises HasMacros, UnsafeFile, DamagedFile, ContentTooLarge."""
    if any(name.lower().endswith(("vbaproject.bin", "vbadata.xml")) for name in archive.names):
        raise HasMacros
    main = _main(archive)
    references = list(_references(archive, _relations_of(main), main))
    parts = _text_parts(archive, main, {kind: part for _, kind, part in references})
    margins = {
        part_id: _clean(archive.read(part))
        for part_id, kind, part in references
        if kind in _MARGINS and part in archive.names
    }
    settings = next((part for _, kind, part in references if kind == "settings" and part in archive.names), None)
    even_differ = settings is not None and b"evenAndOddHeaders" in archive.read(settings)
    try:
        return Opened(docx.Document(_package(parts)), margins, even_differ)
    except MemoryError:
        raise
    except Exception:
        # A broken document raises errors of zipfile, lxml and python-docx.
        raise DamagedFile("its text cannot be read as a Word document") from None


def _main(archive: Archive) -> str:
    top = {kind: part for _, kind, part in _references(archive, "_rels/.rels", "")}
    main = top.get("officeDocument", "")
    if main not in archive.names:
        main = "word/document.xml"
    if main not in archive.names:
        raise DamagedFile("the part with its text is missing")
    return main


def _relations_of(part: str) -> str:
    """The part with what `part` refers to."""
    folder, _, name = part.rpartition("/")
    return f"{folder}/_rels/{name}.rels".lstrip("/")


def _text_parts(archive: Archive, main: str, named: dict[str, str]) -> dict[str, bytes]:
    top = {kind: part for _, kind, part in _references(archive, "_rels/.rels", "")}
    named = named | {"document": main, "core-properties": top.get("core-properties", "")}
    return {kind: _clean(archive.read(named[kind])) for kind in _TYPES if named.get(kind) in archive.names}


def _references(archive: Archive, name: str, base: str) -> Iterator[tuple[str, str, str]]:
    """(id, last word of the type, part) of what a part refers to inside the file."""
    if name not in archive.names:
        return
    for reference in parse_small(archive.read(name), "the list of its parts"):
        if reference.get("TargetMode") != "External":
            kind = reference.get("Type", "").rpartition("/")[2]
            yield reference.get("Id", ""), kind, resolve(base, reference.get("Target", ""))


def _clean(xml: bytes) -> bytes:
    refuse_declarations(xml)
    for strict, transitional in _STRICT:
        xml = xml.replace(strict, transitional)
    return xml


def _package(parts: dict[str, bytes]) -> io.BytesIO:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as copy:
        overrides = "".join(f'<Override PartName="/word/{kind}.xml" ContentType="{_TYPES[kind]}"/>' for kind in parts)
        copy.writestr(
            "[Content_Types].xml",
            '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"><Default Extension="rels" '
            f'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>{overrides}</Types>',
        )
        top = {f"{_OFFICE}/officeDocument": "word/document.xml"}
        if "core-properties" in parts:
            top[_CORE] = "word/core-properties.xml"
        copy.writestr("_rels/.rels", _relations(top))
        own = {f"{_OFFICE}/{kind}": f"{kind}.xml" for kind in _OPTIONAL if kind in parts}
        copy.writestr("word/_rels/document.xml.rels", _relations(own))
        for kind, xml in parts.items():
            copy.writestr(f"word/{kind}.xml", xml)
    buffer.seek(0)
    return buffer


def _relations(targets: dict[str, str]) -> str:
    lines = [f'<Relationship Id="r{n}" Type="{kind}" Target="{to}"/>' for n, (kind, to) in enumerate(targets.items())]
    space = "http://schemas.openxmlformats.org/package/2006/relationships"
    return f'<Relationships xmlns="{space}">{"".join(lines)}</Relationships>'
