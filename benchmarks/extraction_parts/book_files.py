"""EPUB books, from zipfile."""

import io
import zipfile
from collections.abc import Callable, Sequence

from benchmarks.extraction_parts import story
from benchmarks.extraction_parts.story import Made
from benchmarks.extraction_parts.web_files import body_of
from benchmarks.extraction_parts.word_files import counted

CONTAINER = (
    '<?xml version="1.0"?><container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="{}" media-type="application/oebps-package+xml"/></rootfiles></container>'
)


def chapter(body: str, title: str = "") -> str:
    return (
        '<?xml version="1.0" encoding="utf-8"?><!DOCTYPE html><html xmlns="http://www.w3.org/1999/xhtml"><head>'
        f"<title>{title}</title></head><body>{body}</body></html>"
    )


def packed(
    chapters: Sequence[tuple[str, str | bytes]],
    *,
    folder: str = "OEBPS/",
    spine: Sequence[int] | None = None,
    title: str = "Harbour Tales",
    more: dict[str, str | bytes] | None = None,
) -> bytes:
    """A book of (file name, contents); `spine` lists chapters by number in the order of reading."""
    items = "".join(
        f'<item id="c{number}" href="{name}" media-type="application/xhtml+xml"/>'
        for number, (name, _) in enumerate(chapters)
    )
    references = "".join(f'<itemref idref="c{n}"/>' for n in (range(len(chapters)) if spine is None else spine))
    package = (
        '<?xml version="1.0"?><package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="i">'
        f'<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>{title}</dc:title></metadata>'
        f'<manifest>{items}<item id="css" href="a.css" media-type="text/css"/></manifest>'
        f"<spine>{references}</spine></package>"
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as book:
        book.writestr("mimetype", "application/epub+zip")
        book.writestr("META-INF/container.xml", CONTAINER.format(folder + "book.opf"))
        book.writestr(folder + "book.opf", package)
        for name, contents in chapters:
            book.writestr(folder + name, contents, zipfile.ZIP_DEFLATED)
        for name, contents in (more or {}).items():
            book.writestr(name, contents)
    return buffer.getvalue()


def _chapters(n: int) -> list[tuple[str, str]]:
    return [
        (f"c{number}.xhtml", chapter(f"<h1>Part {number}</h1><p>{story.ENGLISH[number]}</p>", f"Part {number}"))
        for number in range(n)
    ]


def plain() -> Made:
    truth = "\n".join(f"Part {number} {story.ENGLISH[number]}" for number in range(4))
    return Made(packed(_chapters(4)), truth, 4, tuple(f"Part {number}" for number in range(4)))


def ordered() -> Made:
    """The spine goes another way than the files and the list of them."""
    order = (2, 0, 3, 1)
    truth = "\n".join(f"Part {number} {story.ENGLISH[number]}" for number in order)
    return Made(packed(_chapters(4), spine=order), truth, 4)


def report() -> Made:
    told = story.report()
    return Made(packed([("text.xhtml", chapter(body_of(told)))]), counted(told))


def self_closed() -> Made:
    """Elements that close themselves, which HTML would take as open."""
    body = f'<a id="p1"/><div/><p>{story.ENGLISH[0]}</p><p/><span class="x" /><p>{story.ENGLISH[1]}</p>'
    source = chapter(body).replace("<title></title>", "<title/><script src='a.js'/>")
    return Made(packed([("a.xhtml", source)]), "\n".join(story.ENGLISH[:2]))


def addressed() -> Made:
    """File names with blanks and letters beyond ASCII, in folders, and the package at the top."""
    chapters = [("my%20text/erster%20Teil.xhtml", ""), ("%C3%BCber.xhtml", "")]
    data = packed(
        chapters,
        folder="",
        more={
            "my text/erster Teil.xhtml": chapter(f"<p>{story.GERMAN[0]}</p>"),
            "über.xhtml": chapter(f"<p>{story.GERMAN[1]}</p>"),
        },
    )
    return Made(data, "\n".join(story.GERMAN), 2)


def languages() -> Made:
    texts = (*story.CHINESE, *story.JAPANESE, *story.RUSSIAN)
    return Made(packed([("a.xhtml", chapter("".join(f"<p>{text}</p>" for text in texts)))]), "\n".join(texts))


def long() -> Made:
    """Chapters of several pages."""
    told = [story.long_story(12) for _ in range(3)]
    chapters = [(f"{number}.xhtml", chapter(body_of(each))) for number, each in enumerate(told)]
    return Made(packed(chapters), "\n".join(each.said for each in told))


FILES: dict[str, Callable[[], Made]] = {
    "four chapters": plain,
    "spine in another order": ordered,
    "report with lists and a table": report,
    "self-closed elements": self_closed,
    "names with blanks and umlauts": addressed,
    "Chinese, Japanese, Russian": languages,
    "long chapters": long,
}
