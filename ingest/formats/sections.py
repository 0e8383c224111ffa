"""A document without pages of its own: a run of sections, cut into pages of about 3,000 characters."""

from collections.abc import Iterable
from dataclasses import dataclass

from ingest.formats.text import PAGE_CHARS, split_pages

_LAID_OUT_CHARS = 3 * PAGE_CHARS
"""A page that the document itself ends is not cut below this: dense print has more than `PAGE_CHARS`."""


@dataclass(frozen=True, slots=True)
class Section:
    """One block at the top level of the document; `level` is 1-6 for headings, else 0.

    `starts_page`: the document begins a page here. `tight`: no blank line before it, as between items of a list.
    """

    text: str
    level: int = 0
    starts_page: bool = False
    tight: bool = False

    @property
    def heading(self) -> str | None:
        """What a heading says; None for any other section."""
        return self.text.lstrip("# ") if self.level else None


def first_heading(sections: Iterable[Section]) -> str | None:
    """What a document without a title can be called."""
    return next((section.heading for section in sections if section.level), None)


def paginate(sections: Iterable[Section], *, laid_out: bool = False) -> list[tuple[str | None, str]]:
    """Pages as (heading it starts under, text).

    A page ends where the document says so, when it is full, and before a heading once it is half full; only where the
    document says so when it is `laid_out`. A page that the document leaves blank has no text.
    """
    pages = _Pages(_LAID_OUT_CHARS if laid_out else PAGE_CHARS, ends_at_headings=not laid_out)
    for section in sections:
        pages.add(section)
    return pages.finished()


class _Pages:
    """Holds the sections of one page until it ends."""

    def __init__(self, most: int, *, ends_at_headings: bool) -> None:
        self._most = most
        self._ends_at_headings = ends_at_headings
        self._pages: list[tuple[str | None, str]] = []
        self._held: list[str] = []
        self._n_held = 0
        self._was_begun = False
        self._under: str | None = None
        self._held_under: str | None = None

    def add(self, section: Section) -> None:
        if section.starts_page and not self._held and self._was_begun:
            self._pages.append((self._under, ""))
        elif section.starts_page or self._is_over(section):
            self._flush()
        self._was_begun = True
        if section.level:
            self._under = section.heading
        if not self._held:
            self._held_under = self._under
        if section.text:
            gap = ("\n" if section.tight else "\n\n") if self._held else ""
            self._held.append(gap + section.text)
            self._n_held += len(section.text) + 2

    def _is_over(self, section: Section) -> bool:
        if not self._held:
            return False
        at_heading = self._ends_at_headings and section.level and self._n_held >= self._most // 2
        return bool(at_heading) or self._n_held + len(section.text) > self._most

    def _flush(self) -> None:
        self._pages += [(self._held_under, part) for part in split_pages("".join(self._held), self._most)]
        self._held, self._n_held = [], 0

    def finished(self) -> list[tuple[str | None, str]]:
        self._flush()
        while self._pages and not self._pages[-1][1]:
            self._pages.pop()
        return self._pages
