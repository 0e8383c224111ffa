"""Which pages of a document an answer could see, and how."""

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
    """What one answer saw of a windowed document of `n_tokens` tokens: sinks and window, `spans` that were fetched, and
    the summary. A page counts as read when at least one of its tokens was; blank ones are passed over."""

    def __init__(
        self, document_id: str, policy: Policy, n_tokens: int, pages: Sequence[PageTokens], spans: Sequence[SpanRef]
    ) -> None:
        resident = [(0, policy.sink_tokens), (n_tokens - policy.window_tokens, n_tokens)]
        self._document_id = document_id
        self._summarized = policy.summary_tokens > 0
        self._pages = [page for page in pages if page.token_start < page.token_end]
        self._verbatim = _touched(self._pages, resident)
        self._fetched = _touched(self._pages, [(span.first, span.first + span.n_tokens) for span in spans])

    def provenance(self) -> list[Provenance]:
        """Ranges of pages by mode, in the order of the pages within each."""
        read = self._verbatim | self._fetched
        modes = [(VERBATIM, self._verbatim), (FETCHED, self._fetched)]
        if self._summarized:
            modes.append((SUMMARY, {page.number for page in self._pages} - read))
        return [part for mode, numbers in modes for part in self._ranges(mode, numbers)]

    def notice(self, cited_pages: Iterable[int]) -> str | None:
        """A sentence when no page that the answer quotes was read word for word."""
        if not (self._verbatim | self._fetched).isdisjoint(cited_pages):
            return None
        rest = "The other pages were only summarized" if self._summarized else "The other pages were not read"
        return (
            f"No page that was read word for word has what this answer says. {rest}: compare the answer with the "
            "document."
        )

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


def _touched(pages: Sequence[PageTokens], ranges: Sequence[tuple[int, int]]) -> set[int]:
    return {
        page.number
        for page in pages
        if any(first < page.token_end and page.token_start < last for first, last in ranges)
    }
