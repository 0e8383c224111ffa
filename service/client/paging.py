"""Lists that come page by page, told one by one: the same for every kind of thing, and for both clients."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Protocol, TypeVar


class Identified(Protocol):
    """A thing that a list can go on behind."""

    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=Identified)
Item_co = TypeVar("Item_co", bound=Identified, covariant=True)


class Page(Protocol[Item_co]):
    """A part of a list, and whether more is behind it."""

    @property
    def data(self) -> Sequence[Item_co]: ...
    @property
    def has_more(self) -> bool: ...


# In both, a page is fetched before the last one of the page ahead is told: who gets it may delete it, and nothing goes
# on behind what is gone.


def one_by_one(page_behind: Callable[[str | None], Page[Item]]) -> Iterator[Item]:
    """All that is listed; `page_behind` fetches what follows an id, or the beginning."""
    page = page_behind(None)
    while page.has_more and page.data:
        *first, last = page.data
        yield from first
        page = page_behind(last.id)
        yield last
    yield from page.data


async def one_by_one_async(page_behind: Callable[[str | None], Awaitable[Page[Item]]]) -> AsyncIterator[Item]:
    """As `one_by_one`."""
    page = await page_behind(None)
    while page.has_more and page.data:
        *first, last = page.data
        for each in first:
            yield each
        page = await page_behind(last.id)
        yield last
    for each in page.data:
        yield each
