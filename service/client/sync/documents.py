"""Documents."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from msgspec import UNSET, UnsetType

from service.client import calls
from service.client.downloads import partial_file
from service.client.models import Document, DocumentList, Page, Receipt, Uploaded
from service.client.paging import one_by_one
from service.client.sources import OnSent, opened
from service.client.streams import DocumentFollowing, ready
from service.client.sync.shares import Shares
from service.client.sync.transport import Transport


class Documents:
    """`client.documents`. Every method raises PrereadError; those that take an id NotFound."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.shares = Shares(transport, "documents")

    def upload(
        self,
        file: str | os.PathLike[str] | bytes | BinaryIO,
        *,
        filename: str | None = None,
        title: str | None = None,
        password: str | None = None,
        retention: str | None = None,
        ttl_s: int | None = None,
        on_progress: OnSent | None = None,
        idempotency_key: str | None = None,
    ) -> Uploaded:
        """Send a path, bytes or an open binary file, in pieces; the server then begins to read it (`wait`).

        `on_progress` is called with the bytes sent and all there are. The same file sent again is the same document,
        whose `created` is false. Raises OSError, RateLimited above a quota, TooLarge, UnsupportedType, StorageFull.
        """
        form = {"title": title, "password": password, "retention": retention, "ttl_s": ttl_s}
        with opened(file, filename, on_progress) as source:
            return self._transport.send(calls.upload(source, form, idempotency_key))

    def wait(
        self,
        document_id: str,
        *,
        on_progress: Callable[[Document], object] | None = None,
        timeout_s: float | None = None,
    ) -> Document:
        """The document once it is ready. `on_progress` is called with it each time it is further.

        `timeout_s` is looked at when the server says something, which it does every 15 seconds. Raises DocumentFailed
        when it ends otherwise, TimedOut.
        """
        last = None
        for last in self.events(document_id, timeout_s=timeout_s):
            if on_progress is not None:
                on_progress(last)
        return ready(last)

    def events(self, document_id: str, *, timeout_s: float | None = None) -> Iterator[Document]:
        """The document each time it is further, until it is ready, failed or cancelled."""
        following = DocumentFollowing(document_id, self._transport.patience, self._transport.url, timeout_s)
        return self._transport.follow(following)

    def list(self, *, shared: bool = False, page_size: int = 100) -> Iterator[Document]:
        """All of yours, newest first, fetched as they are iterated; with `shared` those of others that you may see.
        What was iterated may be deleted meanwhile."""
        return one_by_one(lambda after: self.list_some(limit=page_size, after=after, shared=shared))

    def list_some(self, *, limit: int = 20, after: str | None = None, shared: bool = False) -> DocumentList:
        """`limit` of them (at most 100), behind the one with the id `after`."""
        return self._transport.send(calls.list_documents(limit, after, shared))

    def get(self, document_id: str) -> Document:
        """One document, and how far it is."""
        return self._transport.send(calls.get_document(document_id))

    def update(
        self,
        document_id: str,
        *,
        title: str | UnsetType = UNSET,
        ttl_s: int | UnsetType | None = UNSET,
        pinned: bool | UnsetType = UNSET,
    ) -> Document:
        """Change what is given. `ttl_s` counts from now; None: it does not expire."""
        return self._transport.send(calls.update_document(document_id, title=title, ttl_s=ttl_s, pinned=pinned))

    def pin(self, document_id: str) -> Document:
        """Keep it from expiring and from eviction."""
        return self.update(document_id, pinned=True)

    def unpin(self, document_id: str) -> Document:
        return self.update(document_id, pinned=False)

    def cancel(self, document_id: str) -> Document:
        """Stop reading it. Raises Conflict when it is ready or has failed."""
        return self._transport.send(calls.cancel_document(document_id))

    def delete(self, document_id: str) -> Receipt:
        """Remove it from every tier, with its sessions; what was removed."""
        return self._transport.send(calls.delete_document(document_id))

    def page(self, document_id: str, number: int) -> Page:
        """The text of a page, from 1. Raises Conflict before it was parsed."""
        return self._transport.send(calls.get_page(document_id, number))

    def pages(self, document_id: str) -> Iterator[Page]:
        """The text of all pages in order."""
        for number in range(1, (self.get(document_id).page_count or 0) + 1):
            yield self.page(document_id, number)

    def file(self, document_id: str) -> bytes:
        """The bytes that were uploaded."""
        return self._transport.send(calls.get_file(document_id))

    def save_file(self, document_id: str, to: str | os.PathLike[str]) -> Path:
        """Write them to a file, which is there only when it is whole. Raises OSError."""
        with partial_file(to) as file:
            self._transport.save(calls.get_file(document_id), file)
        return Path(to)
