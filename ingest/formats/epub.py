"""EPUB books: their chapters in the order of the spine, each read as HTML."""

from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import unquote
from xml.etree.ElementTree import Element

from ingest.errors import DamagedFile, Protected, UnsupportedType
from ingest.formats.archive import Archive, resolve
from ingest.formats.html import HtmlText, decoded, read_html
from ingest.formats.sections import Section, first_heading
from ingest.formats.xml import local_name, parse_small
from ingest.limits import ParseLimits
from ingest.words import counted

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_PAGES = frozenset(("application/xhtml+xml", "text/html", "application/x-dtbook+xml", "text/x-oeb1-document"))
_FONT_METHODS = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")


def read_epub(archive: Archive, limits: ParseLimits) -> HtmlText:
    """The book's title and text. A chapter that is lost is a warning.

    Raises DamagedFile, Protected, UnsafeFile and ContentTooLarge.
    """
    package_name = _package_name(archive)
    package = parse_small(_part(archive, package_name), "the book's list of contents")
    chapters = list(dict.fromkeys(_spine(package, package_name)))
    _refuse_protected(archive, set(chapters))
    sections: list[Section] = []
    n_lost = 0
    for name in chapters:
        try:
            sections += _chapter(_part(archive, name), limits)
        except (DamagedFile, UnsupportedType):
            n_lost += 1
    if not chapters or n_lost == len(chapters):
        raise DamagedFile("none of its chapters can be read")
    heading = first_heading(sections)
    lost = f"{counted(n_lost, 'chapter')} of {len(chapters):,} could not be read."
    return HtmlText(_title(package) or heading, sections, (lost,) if n_lost else ())


def _package_name(archive: Archive) -> str:
    container = parse_small(_part(archive, _CONTAINER), "the book's container")
    for element in container.iter():
        if local_name(element.tag) == "rootfile":
            return resolve("", element.get("full-path", ""))
    raise DamagedFile("the book's container names no contents")


def _part(archive: Archive, name: str) -> bytes:
    if name not in archive.names:
        raise DamagedFile("a part that it names is missing")
    return archive.read(name)


def _spine(package: Element, package_name: str) -> Iterator[str]:
    """The names of the chapters in the order of reading; a book may list one under several ids."""
    items = {element.get("id", ""): element for element in package.iter() if local_name(element.tag) == "item"}
    references = [element.get("idref", "") for element in package.iter() if local_name(element.tag) == "itemref"]
    for reference in dict.fromkeys(references):
        item = items.get(reference)
        if item is not None and item.get("media-type", "").lower() in _PAGES:
            yield resolve(package_name, unquote(item.get("href", "").partition("#")[0]))


def _chapter(data: bytes, limits: ParseLimits) -> list[Section]:
    """A chapter's sections; it begins on a page of its own."""
    sections = read_html(decoded(data)[0], limits, is_xhtml=True).sections if data.strip() else []
    return [replace(sections[0], starts_page=True, tight=False), *sections[1:]] if sections else []


def _refuse_protected(archive: Archive, chapters: set[str]) -> None:
    """Fonts may be encrypted in books that are open; text may not."""
    if _ENCRYPTION not in archive.names:
        return
    for element in parse_small(_part(archive, _ENCRYPTION), "the book's list of protected parts").iter():
        if local_name(element.tag) != "EncryptedData":
            continue
        parts = {local_name(part.tag): part for part in element.iter()}
        method = parts["EncryptionMethod"].get("Algorithm", "") if "EncryptionMethod" in parts else ""
        named = unquote(parts["CipherReference"].get("URI", "")) if "CipherReference" in parts else ""
        if method not in _FONT_METHODS and resolve("", named) in chapters:
            raise Protected("EPUB book")


def _title(package: Element) -> str | None:
    found = (element.text for element in package.iter() if local_name(element.tag) == "title")
    return next((" ".join(text.split()) for text in found if text and text.strip()), None)
