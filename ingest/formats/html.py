"""HTML as readable text: structure stays; scripts, styles and what is hidden go. Nothing it refers to is fetched.

A page is walked with a stack of our own, because a file may be nested deeper than any call stack.
"""

import codecs
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path

from selectolax.lexbor import LexborHTMLParser, LexborNode, SelectolaxError

from ingest.encoding import decode, decoded_as
from ingest.errors import ContentTooLarge, DamagedFile, UnsupportedType
from ingest.formats.html_blocks import Blocks
from ingest.formats.sections import Section, first_heading
from ingest.limits import ParseLimits

_SKIPPED = frozenset(
    (
        "script", "style", "noscript", "template", "head", "title", "iframe", "object", "embed", "applet", "canvas",
        "audio", "video", "svg", "annotation", "annotation-xml", "datalist", "select", "rp",
    )
)  # fmt: skip
_HIDDEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_DATA_URI = re.compile(r"data:[\w.+-]*+/?[\w.+-]*+;base64,[A-Za-z0-9+/=\s%]{200,}+", re.ASCII)
_CHARSET = re.compile(
    rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w-]+)|<\?xml[^>]{0,100}?encoding=[\"']([\w-]+)", re.I
)
_CHARSET_NBYTES = 4096
_MEANT = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "gb2312": "gb18030", "gbk": "gb18030",
    "shift_jis": "cp932", "euc_kr": "cp949",
}  # fmt: skip
"""What browsers read under these names, and so what pages that carry them are written in: dashes, quotation marks and
the euro sign are in the larger one only."""
_CDATA = re.compile(r"<!\[CDATA\[(.*?)(?:\]\]>|\Z)", re.DOTALL)
_SELF_CLOSED = re.compile(
    r"<(?!(?:area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr)\b)"
    r"([A-Za-z][\w:.-]*+)((?:[^<>\"'/]|/(?!>)|\"[^\"]*+\"|'[^']*+')*+)/>"
)
_CLOSED_UNSAID = (
    "area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr|p|li|dt|dd|td|th|tr|tbody|thead|tfoot|option|"
    "optgroup|colgroup|rp|rt|a|body|html|head"
)
_NESTS = re.compile(rf"<(/?)(?!(?:{_CLOSED_UNSAID})(?![A-Za-z0-9:-]))[A-Za-z]", re.IGNORECASE)
_STEP = {"": 1, "/": -1}
_MOST_NESTED = 10_000


@dataclass(frozen=True, slots=True)
class HtmlText:
    """What one page says; `title` is the one it gives itself, else its first heading."""

    title: str | None
    sections: list[Section]
    warnings: tuple[str, ...] = ()


def read_html_file(path: Path, limits: ParseLimits) -> HtmlText:
    """The page in a file. Raises ContentTooLarge, UnsupportedType (no encoding makes text of it)."""
    nbytes = path.stat().st_size
    if nbytes > limits.unpacked_nbytes:
        raise ContentTooLarge("HTML", nbytes, limits.unpacked_nbytes)
    source, warning = decoded(path.read_bytes())
    page = read_html(source, limits)
    return HtmlText(page.title, page.sections, (warning,) if warning else ())


def decoded(data: bytes) -> tuple[str, str | None]:
    """A page's text: by its mark or as UTF-8, else in the encoding that it names, else in a likely one."""
    found = decode(data)
    if found is None:
        raise UnsupportedType("binary data")
    if found.encoding.startswith("utf"):
        return found.text, found.warning
    named = _CHARSET.search(data[:_CHARSET_NBYTES])
    if named is not None:
        try:
            name = codecs.lookup((named[1] or named[2]).decode()).name
            if not name.startswith("utf"):  # which it is not, as was just seen
                found = decoded_as(data, _MEANT.get(name, name))
        except (LookupError, UnicodeError):
            pass  # no encoding of text that there is
    return found.text, found.warning


def read_html(source: str, limits: ParseLimits, *, is_xhtml: bool = False) -> HtmlText:
    """The page whose markup is `source`. Raises ContentTooLarge, and DamagedFile for absurd nesting."""
    source = _DATA_URI.sub("", source)
    nbytes = len(source.encode("utf-8", "replace"))
    if nbytes > limits.markup_nbytes:
        raise ContentTooLarge("HTML", nbytes, limits.markup_nbytes)
    if is_xhtml:
        # Read as HTML such text would be a comment.
        source = _CDATA.sub(lambda part: escape(part[1], quote=False), source)
        # In XHTML any element may close itself; read as HTML it would take in all that follows.
        source = _SELF_CLOSED.sub(r"<\1\2></\1>", source)
    if source.count("<") > _MOST_NESTED and _depth(source) > _MOST_NESTED:
        # The parser takes time by the square of the depth.
        raise DamagedFile("its contents are nested too deeply")
    tree = _parsed(source.replace("\0", ""))
    blocks = Blocks()
    if tree.body is not None:
        _walk(tree.body, blocks)
    sections = blocks.finished()
    title = tree.css_first("head > title")
    named = " ".join(title.text(deep=True).split()) if title is not None else ""
    heading = first_heading(sections)
    return HtmlText(named or heading, sections)


def _parsed(source: str) -> LexborHTMLParser:
    try:
        return LexborHTMLParser(source)
    except SelectolaxError:
        # It parses whatever there is, and fails only where it gets no memory: 40 times the size of dense markup.
        raise MemoryError from None


def _depth(source: str) -> int:
    """How deep elements lie in each other at most, as far as their tags tell."""
    heights = list(accumulate(map(_STEP.__getitem__, _NESTS.findall(source)), initial=0))
    # A closing tag too many does not lead below the ground.
    return max(map(operator.sub, heights, accumulate(heights, min)))


def _walk(body: LexborNode, blocks: Blocks) -> None:
    """Depth first, in the order of the text: each element is entered, and left after all that is in it."""
    node: LexborNode | None = body
    opened: list[tuple[LexborNode, str]] = []
    while node is not None:
        tag = node.tag or ""
        if tag == "-text":
            blocks.add_text(node.text_content or "")
        elif tag not in _SKIPPED and tag[:1].isalpha() and _is_shown(tag, attributes := node.attributes):
            blocks.enter(tag, attributes)
            if (child := node.child) is not None:
                opened.append((node, tag))
                node = child
                continue
            blocks.leave(tag)
        while (following := node.next) is None and opened:
            node, tag = opened.pop()
            blocks.leave(tag)
        node = following if opened else None


def _is_shown(tag: str, attributes: Mapping[str, str | None]) -> bool:
    if not attributes:
        return True
    if "hidden" in attributes or (tag == "input" and attributes.get("type") == "hidden"):
        return False
    return _HIDDEN.search(attributes.get("style") or "") is None
