"""Markdown as readable text: its structure stays (headings, lists, tables, code), its inline marks go.

Emphasis marks, link brackets and escapes are taken off because answers quote words, not markup. What a
reader of the rendered document does not see (comments, tags) is not given to the model either.
"""

import re
from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

from ingest.formats.sections import Section, first_heading
from ingest.formats.tables import table_text

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?\n)(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_TITLE = re.compile(r"^title:[ \t]*[\"']?(.+?)[\"']?[ \t]*$", re.MULTILINE | re.IGNORECASE)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_BREAK_TAG = re.compile(r"<(?:br|/p|/div|/tr|/li|/h\d)\b[^>]*>", re.IGNORECASE)
_TAG = re.compile(r"</?[A-Za-z][^>]*>")
_MAX_NESTING = 100


def render(source: str) -> tuple[str | None, list[Section]]:
    """The title (front matter's, else the first heading's) and the document's blocks as plain text."""
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    front = _FRONT_MATTER.match(source)
    body = source[front.end() :] if front else source
    sections = [Section(front.group(1).strip())] if front else []
    sections += _sections(body)
    named = _TITLE.search(front.group(1)) if front else None
    heading = first_heading(sections)
    return (named.group(1) if named else heading), sections


def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark", {"maxNesting": _MAX_NESTING}).enable(["table", "strikethrough"])


def _sections(body: str) -> list[Section]:
    """The body's blocks; as it stands when it is nested deeper than anything a person writes."""
    tokens = _parser().parse(body)
    # The parser drops what lies below its limit.
    if any(token.level >= _MAX_NESTING - 1 for token in tokens):
        return [Section(body)]
    try:
        return [section for node in SyntaxTreeNode(tokens).children if (section := _section(node)).text]
    except RecursionError:
        return [Section(body)]


def _section(node: SyntaxTreeNode) -> Section:
    level = int(node.tag[1]) if node.type == "heading" else 0
    return Section("\n".join(_block(node)).rstrip(), level)


def _block(node: SyntaxTreeNode) -> Iterator[str]:
    match node.type:
        case "heading":
            yield f"{'#' * int(node.tag[1])} {' '.join(_inline_of(node).split())}"
        case "bullet_list" | "ordered_list":
            yield from _list(node)
        case "blockquote":
            yield from _prefixed(_blocks(node), "> ", "> ")
        case "fence" | "code_block":
            yield from ["```" + node.info.strip(), *node.content.rstrip("\n").split("\n"), "```"]
        case "table":
            yield from _table(node)
        case "html_block":
            yield from _untagged(node.content).strip().split("\n")
        case "hr":
            yield "---"
        case _:
            yield from _inline_of(node).split("\n")


def _blocks(node: SyntaxTreeNode, *, tight: bool = False) -> Iterator[str]:
    for index, child in enumerate(node.children):
        if index and not tight:
            yield ""
        yield from _block(child)


def _list(node: SyntaxTreeNode) -> Iterator[str]:
    first = int(node.attrGet("start") or 1) if node.type == "ordered_list" else 0
    for index, item in enumerate(node.children):
        mark = f"{first + index}{item.markup} " if node.type == "ordered_list" else "- "
        tight = all(child.hidden for child in item.children if child.type == "paragraph")
        yield from _prefixed(_blocks(item, tight=tight), mark, " " * len(mark))


def _prefixed(lines: Iterator[str], first: str, rest: str) -> Iterator[str]:
    for index, line in enumerate(lines):
        yield ((rest if index else first) + line).rstrip()


def _table(node: SyntaxTreeNode) -> Iterator[str]:
    rows = [row for part in node.children for row in part.children]
    yield from table_text([[_inline_of(cell) for cell in row.children] for row in rows]).split("\n")


def _inline_of(node: SyntaxTreeNode) -> str:
    if node.type == "inline":
        return "".join(_inline(child) for child in node.children)
    return "".join(_inline_of(child) for child in node.children)


def _inline(node: SyntaxTreeNode) -> str:
    inner = "".join(_inline(child) for child in node.children)
    match node.type:
        case "text" | "code_inline":
            return node.content
        case "softbreak" | "hardbreak":
            return "\n"
        case "html_inline":
            return _untagged(node.content)
        case "link":
            target = str(node.attrGet("href") or "")
            return inner if target in (inner, f"mailto:{inner}", "") or target[0] == "#" else f"{inner} ({target})"
        case "image":
            return f"[image: {inner}]" if inner else ""
        case "s":
            return f"~~{inner}~~"
    return inner


def _untagged(html: str) -> str:
    return _TAG.sub("", _BREAK_TAG.sub("\n", _COMMENT.sub("", html)))
