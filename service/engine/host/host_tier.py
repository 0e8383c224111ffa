"""Documents that had to leave the device, kept in host memory: they come back without the disk.

Their bytes were verified when they were read, or computed here, and have not left this process since, so a checksum
would only be compared with itself. What a copy could get wrong is seen by the canary, which a document that comes back
must pass again: its last token is re-fed anyway.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from service.engine.drafts.lookup import DocumentLookup
from service.engine.host.residency import ResidentDocument
from service.engine.host.window import Window
from service.engine.messages import DocumentRef
from service.engine.protocol import HostCopies, Runner
from service.engine.scheduler.loop import Scheduler

log = logging.getLogger(__name__)

LAYERS_AHEAD = 4
"""Layers whose copies may wait for the engine's thread; between two of them it can do a step."""


@dataclass(slots=True, eq=False)
class HeldDocument:
    """A document in host memory; `memory` is the runner's. `n_users` copy from or to it now; it is `complete` once
    every layer is there."""

    ref: DocumentRef
    token_digest: str
    n_tokens: int
    last_token: int
    canary: Any
    next_position: int | None
    last_position: int | None
    pinned: bool
    lookup: DocumentLookup | None
    memory: Any
    n_users: int = 0
    complete: bool = False
    on_device: bool = False
    forgotten: bool = False
    last_used_s: float = 0.0


class HostTier:
    """Copies of documents in host memory, within the room that the runner's `HostCopies` has. Any thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner, copies: HostCopies) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._copies = copies
        self._lock = threading.Lock()
        self._held: dict[DocumentRef, HeldDocument] = {}

    @property
    def n_documents(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that hold documents."""
        return self._copies.used_nbytes

    @property
    def refs(self) -> list[DocumentRef]:
        with self._lock:
            return list(self._held)

    @property
    def lookups(self) -> list[DocumentLookup]:
        """Where documents' tokens are found again; those of one that is on the device too are the same object."""
        with self._lock:
            return [held.lookup for held in self._held.values() if held.lookup is not None]

    def keep(self, entry: ResidentDocument, wanted: DocumentRef | None = None) -> bool:
        """Copy a complete document, which must stay as it is meanwhile, before it leaves the device.

        False when there is no room even without the others, the one `wanted` next apart, and for a document with slots.
        Raises what the runner raises; nothing is kept then.
        """
        if entry.n_slot_rows:
            return False
        held = self._reserve(entry, wanted)
        if held is None:
            return False
        if not held.on_device:
            try:
                self._copy(lambda layer: self._copies.copy_out(entry.handle, held.memory, layer))
            except BaseException:
                self._leave(held, forget=True)
                raise
        held.complete, held.on_device, held.pinned = True, False, entry.pinned
        self._leave(held)
        return True

    def move_out(self, entry: ResidentDocument, wanted: DocumentRef) -> None:
        """`keep`, unless the document is being deleted."""
        self.keep(entry, wanted)
        if entry.dropped:
            self.forget(entry.ref)

    def bring_back(self, entry: ResidentDocument, check: Callable[[], None] = lambda: None) -> bool:
        """Fill a new document of the runner from its copy; False when there is none of these tokens.

        `check` is called between layers and may raise to give up. Raises what the runner raises.
        """
        held = self._enter(entry)
        if held is None:
            return False
        try:
            entry.handle = self._scheduler.run(self._runner.new_document, entry.n_tokens)
            self._copy(lambda layer: self._copies.copy_in(held.memory, entry.handle, layer), check)
            entry.next_position, entry.last_position = held.next_position, held.last_position
            finish = self._runner.finish_load
            if held.next_position is not None:
                finish = partial(finish, next_position=held.next_position, last_position=held.last_position)
            self._scheduler.run(finish, entry.handle, entry.n_tokens)
            entry.last_token, entry.canary, entry.lookup = held.last_token, held.canary, held.lookup
            held.on_device = True
        finally:
            self._leave(held)
        return True

    def forget(self, ref: DocumentRef) -> int:
        """Drop a document's copy; the bytes that are free for it, now or once nobody copies from it."""
        with self._lock:
            held = self._held.get(ref)
            if held is None:
                return 0
            self._forget(held)
            return self._copies.nbytes_of(held.n_tokens)

    def close(self) -> None:
        self._copies.close()

    def _reserve(self, entry: ResidentDocument, wanted: DocumentRef | None) -> HeldDocument | None:
        """A copy to fill, or one that is still there from before (`on_device`); least recently used ones give way."""
        with self._lock:
            held = self._held.get(entry.ref)
            if held is not None and held.on_device and held.token_digest == entry.token_digest:
                held.n_users += 1
                return held
            if held is not None:
                self._forget(held)
            while (memory := self._copies.take(entry.n_tokens)) is None:
                idle = [h for h in self._held.values() if not h.n_users and h.ref != wanted]
                if not idle:
                    return None
                self._forget(min(idle, key=lambda h: (not h.on_device, h.pinned, h.last_used_s)))
            held = HeldDocument(
                entry.ref, entry.token_digest, entry.n_tokens, entry.last_token, entry.canary,
                entry.next_position, entry.last_position, entry.pinned, entry.lookup, memory, 1,
            )  # fmt: skip
            self._held[entry.ref] = held
            return held

    def _enter(self, entry: ResidentDocument) -> HeldDocument | None:
        with self._lock:
            held = self._held.get(entry.ref)
            if held is None or not held.complete or held.token_digest != entry.token_digest:
                return None
            held.n_users += 1
            return held

    def _leave(self, held: HeldDocument, forget: bool = False) -> None:
        with self._lock:
            held.n_users -= 1
            held.last_used_s = time.monotonic()
            if forget and not held.forgotten:
                self._forget(held)
            elif held.forgotten and not held.n_users:
                self._copies.give_back(held.memory)

    def _forget(self, held: HeldDocument) -> None:
        held.forgotten = True
        del self._held[held.ref]
        if not held.n_users:
            self._copies.give_back(held.memory)

    def _copy(self, begin: Callable[[int], None], check: Callable[[], None] = lambda: None) -> None:
        """Begin the copies of each layer on the engine's thread, and wait here until they are over."""
        window = Window(LAYERS_AHEAD)
        try:
            for layer in range(self._runner.layout.n_layers):
                check()
                window.add(self._scheduler.call(begin, layer))
            window.finish()
        finally:
            # Whatever happens, the memory on both sides is not free before the copies begun are over.
            window.close()
            self._scheduler.run(self._copies.mark).wait()
