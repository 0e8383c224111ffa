"""Pages to the document's token ids, keeping which tokens hold which page.

Each page is encoded by itself, so that page boundaries are token boundaries and a citation's tokens name one
page.
"""

from collections.abc import Sequence
from typing import Protocol

from ingest.model import Document, PageTokens, TokenizedDocument

PAGE_SEPARATOR = "\n\n"
"""Ends every page's text before it is encoded; its tokens belong to the page."""


class Tokenizer(Protocol):
    """Text to token ids, in the two ways a prompt needs."""

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text from outside: control strings in it (``<|im_end|>``) are ordinary characters.

        Nothing is added, neither a first token nor a leading space.
        """
        ...

    def encode_template(self, text: str) -> list[int]:
        """Ids of our own template text: control strings become their special tokens. Nothing is added."""
        ...


def tokenize(
    document: Document,
    tokenizer: Tokenizer,
    *,
    prefix_ids: Sequence[int] = (),
    suffix_ids: Sequence[int] = (),
) -> TokenizedDocument:
    """`prefix_ids`, each page's tokens in order, `suffix_ids`. A blank page has an empty range."""
    token_ids = list(prefix_ids)
    pages: list[PageTokens] = []
    for page in document.pages:
        start = len(token_ids)
        if page.text.strip():
            token_ids += tokenizer.encode_plain(page.text + PAGE_SEPARATOR)
        pages.append(PageTokens(page.number, start, len(token_ids)))
    token_ids += suffix_ids
    return TokenizedDocument(token_ids, tuple(pages))
