"""Which pages of its documents an answer could see, and how."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ingest.model import PageTokens
from service.core.retention import Policy
from service.engine.messages import SpanRef

VERBATIM = "verbatim"
FETCHED = "fetched"
SUMMARY = "summary"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Pages `first_page` to `last_page` were attended to by `mode`."""

    document_id: str
    first_page: int
    last_page: int
    mode: str


def whole_document(document_id: str, page_count: int) -> Provenance:
    """Every page was attended to as it stands."""
    return Provenance(document_id, 1, page_count, VERBATIM)


class Reading:
    """What one answer saw of a document: tokens in the ranges `resident`, ``[first, last)``, `spans` that were fetched,
    and a summary if it is `summarized`. A page counts as read when at least one of its tokens was; blank ones are
    passed over."""

    def __init__(
        self,
        document_id: str,
        resident: Sequence[tuple[int, int]],
        pages: Sequence[PageTokens],
        spans: Sequence[SpanRef],
        *,
        summarized: bool = False,
    ) -> None:
        self._document_id = document_id
        self._summarized = summarized
        self._pages = [page for page in pages if page.token_start < page.token_end]
        self._verbatim = _touched(self._pages, resident)
        self._fetched = _touched(self._pages, [(span.first, span.first + span.n_tokens) for span in spans])

    @classmethod
    def windowed(
        cls, document_id: str, policy: Policy, n_tokens: int, pages: Sequence[PageTokens], spans: Sequence[SpanRef]
    ) -> "Reading":
        """Of a windowed document of `n_tokens` tokens: its sinks and window are resident."""
        resident = [(0, policy.sink_tokens), (n_tokens - policy.window_tokens, n_tokens)]
        return cls(document_id, resident, pages, spans, summarized=policy.summary_tokens > 0)

    @property
    def summarized(self) -> bool:
        return self._summarized

    def holds(self, document_id: str, page: int) -> bool:
        """Whether that page was read word for word."""
        return document_id == self._document_id and page in self._verbatim | self._fetched

    def provenance(self) -> list[Provenance]:
        """Ranges of pages by mode, in the order of the pages within each."""
        read = self._verbatim | self._fetched
        modes = [(VERBATIM, self._verbatim), (FETCHED, self._fetched)]
        if self._summarized:
            modes.append((SUMMARY, {page.number for page in self._pages} - read))
        return [part for mode, numbers in modes for part in self._ranges(mode, numbers)]

    def _ranges(self, mode: str, numbers: set[int]) -> list[Provenance]:
        """Runs of pages that follow each other, blank ones left out of account."""
        parts: list[Provenance] = []
        follows = False
        for page in self._pages:
            if page.number in numbers:
                first = parts.pop().first_page if follows else page.number
                parts.append(Provenance(self._document_id, first, page.number, mode))
            follows = page.number in numbers
        return parts


def notice_of(readings: Sequence[Reading], cited: Iterable[tuple[str, int]]) -> str | None:
    """A sentence when no page that an answer quotes was read word for word; `cited`: documents and their pages."""
    if any(reading.holds(*place) for place in cited for reading in readings):
        return None
    summarized = any(reading.summarized for reading in readings)
    rest = "The other pages were only summarized" if summarized else "The other pages were not read"
    what = "documents" if len(readings) > 1 else "document"
    return f"No page that was read word for word has what this answer says. {rest}: compare the answer with the {what}."


def _touched(pages: Sequence[PageTokens], ranges: Sequence[tuple[int, int]]) -> set[int]:
    return {
        page.number
        for page in pages
        if any(first < page.token_end and page.token_start < last for first, last in ranges)
    }
