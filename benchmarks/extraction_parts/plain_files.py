"""Markdown, and plain text in the encodings that it comes in."""

from collections.abc import Callable

from benchmarks.extraction_parts import story
from benchmarks.extraction_parts.story import Made, Story
from benchmarks.extraction_parts.word_files import counted


def markdown_of(told: Story) -> str:
    parts = []
    for block in told.blocks:
        match block.kind:
            case "title":
                parts.append(f"# {block.text}")
            case "heading":
                parts.append(f"## {block.text}")
            case "bullets":
                parts.append("\n".join(f"* {item}" for item in block.items))
            case "numbers":
                parts.append("\n".join(f"{number}. {item}" for number, item in enumerate(block.items, start=1)))
            case "table":
                head, *rows = ("|" + "|".join(row) + "|" for row in block.rows)
                parts.append("\n".join([head, "|" + "---|" * len(block.rows[0]), *rows]))
            case _:
                parts.append(block.text)
    return "\n\n".join(parts) + "\n"


def markdown() -> Made:
    told = story.report()
    return Made(markdown_of(told).encode(), counted(told))


def marked_up() -> Made:
    """Emphasis, links, quotes, code, comments and tags."""
    source = (
        f"---\ntitle: Harbour\n---\n\n# Rules\n\n**{story.ENGLISH[0][:40]}**{story.ENGLISH[0][40:]}\n\n"
        "<!-- not this -->\n\n"
        "> The horn *sounds* in [fog](#fog).\n\n```\nring the bell\n```\n\n<div>Closed</div>\n"
    )
    truth = f"title Harbour Rules {story.ENGLISH[0]} The horn sounds in fog. ring the bell Closed"
    return Made(source.encode(), truth)


def encoded(encoding: str, *texts: str) -> Callable[[], Made]:
    return lambda: Made("\r\n\r\n".join(texts).encode(encoding), "\n".join(texts))


def long() -> Made:
    told = story.long_story(40)
    return Made("\n\n".join(block.text for block in told.blocks).encode(), told.said)


MARKDOWN: dict[str, Callable[[], Made]] = {"report": markdown, "marks, comments and tags": marked_up}
TEXT: dict[str, Callable[[], Made]] = {
    "English": encoded("ascii", *story.ENGLISH),
    "German, windows-1252": encoded("cp1252", *story.GERMAN),
    "French, UTF-8 with a mark": encoded("utf-8-sig", *story.FRENCH),
    "Chinese, GB18030": encoded("gb18030", *story.CHINESE),
    "Russian, windows-1251": encoded("cp1251", *story.RUSSIAN * 4),
    "Japanese, UTF-16": encoded("utf-16", *story.JAPANESE),
    "forty chapters": long,
}
