"""How a text in a prompt is known to be a document's: by its letters, whatever white space is between them."""

import asyncio
import hashlib
from collections.abc import Iterable
from pathlib import Path

from ingest.formats.text import split_pages
from ingest.model import Document, MediaType, Page
from ingest.normalise import tidy

INLINE, PROMPT, BLANK = "inline", "prompt", "blank"
"""Purposes of documents that chats make: of a file inside a request, of a repeated prompt, and of nothing."""
OURS = frozenset({PROMPT, BLANK})
"""Of text that the server wrote itself: it is taken as it is, whatever it looks like."""


def text_digest(pages: Iterable[str]) -> str:
    """Of pages as they are stored, 32 hex digits. White space does not count: pages are cut at it."""
    digest = hashlib.blake2b(digest_size=16)
    for page in pages:
        digest.update("".join(page.split()).encode())
    return digest.hexdigest()


def message_digest(text: str) -> str:
    """Of a text as it came: the same as that of a document which was made of it."""
    return text_digest([tidy(text)])


async def plain_document(path: Path) -> Document:
    """What the server wrote at `path`, as a document: not sniffed, not rendered."""
    return await asyncio.to_thread(_read, path)


def _read(path: Path) -> Document:
    pages = [text for page in split_pages(path.read_text(encoding="utf-8")) if (text := tidy(page)).strip()]
    return Document(MediaType.TEXT, tuple(Page(number, None, text) for number, text in enumerate(pages, 1)))
