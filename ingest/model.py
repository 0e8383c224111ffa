"""A document as everything after the parser sees it: pages of text, then token ids with page ranges."""

from dataclasses import dataclass
from enum import StrEnum


class MediaType(StrEnum):
    """Kinds of document this version reads."""

    PDF = "application/pdf"
    DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
    EPUB = "application/epub+zip"
    HTML = "text/html"
    MARKDOWN = "text/markdown"
    TEXT = "text/plain"


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a PDF, or a run of text where the format has no pages.

    `number` counts from 1. `label` is the page's own name where it differs from its number: a PDF's "iv", the
    heading a page of another format starts under. `text` may be empty (a blank page keeps its number).
    """

    number: int
    label: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Document:
    """The text of one file. At least one page has text; `warnings` are sentences for whoever uploaded it."""

    media_type: MediaType
    pages: tuple[Page, ...]
    title: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PageTokens:
    """Tokens [token_start, token_end) of the document's ids hold page `number`."""

    number: int
    token_start: int
    token_end: int


@dataclass(frozen=True, slots=True)
class TokenizedDocument:
    """Token ids of template prefix, pages and template suffix, in this order, and where each page lies."""

    token_ids: list[int]
    pages: tuple[PageTokens, ...]

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)

    def page_at(self, token: int) -> int | None:
        """Number of the page that holds the token at this index; None within the template."""
        return next((page.number for page in self.pages if page.token_start <= token < page.token_end), None)
