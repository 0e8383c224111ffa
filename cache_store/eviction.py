"""Which snapshots leave a full disk, and in which order: those first whose loss costs least.

What a snapshot is worth: the seconds that it saves when it is used, per byte, the more the oftener and the less the
longer ago it was used. Snapshots of another fingerprint save nothing and go first. Turns go before documents, the later
ones of a session before the earlier, which they need. A document goes with what was made from it; what a draft model
read of it goes before all that can be used, since answers come without it too.
"""

import math
import os
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from cache_store.area import Area, Removed
from cache_store.disk import storage_errors, tree_size
from cache_store.errors import CacheStoreError
from cache_store.inventory import published
from cache_store.keys import EntryName, SnapshotKey
from cache_store.lock import Unused
from cache_store.marks import Marks, Use
from cache_store.speeds import SpeedBook
from cache_store.stored import read_stored_manifest

HOUR_S = 3600.0
RECENT_S = 60.0
"""What was used so lately goes last: it is likely to be needed by the very question that needs the room."""
NOMINAL_TOKENS_PER_S = 500.0
NOMINAL_BYTES_PER_S = 100e6
"""Until something was measured. Only the order depends on them."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A document with what was made from it, or a turn, of one fingerprint. `seconds`: what it costs not to have it;
    `copy`: the tier that it comes back from then, None when it is computed. `kept`: why it cannot leave, or empty."""

    name: EntryName
    parts: tuple[EntryName, ...]
    nbytes: int
    seconds: float
    use: Use
    position: int
    usable: bool
    kept: str = ""
    copy: str | None = None

    def age_s(self, now: float) -> float:
        return max(0.0, now - self.use.at)

    @property
    def is_draft(self) -> bool:
        return self.name.key.kind == "draft"

    def is_recent(self, now: float) -> bool:
        return self.usable and self.age_s(now) < RECENT_S

    def value(self, now: float) -> float:
        """Seconds saved per byte, weighed."""
        weight = (1 + math.log2(self.use.n)) / (HOUR_S + self.age_s(now))
        return self.seconds / max(1, self.nbytes) * weight

    def order(self, now: float) -> tuple[object, ...]:
        """The least goes first."""
        is_turn = self.name.key.kind == "turn"
        hours = self.age_s(now) // HOUR_S
        rank = (-hours, -self.position) if is_turn else (0.0, 0)
        return self.usable, not self.is_draft, self.is_recent(now), not is_turn, *rank, self.value(now), self.name

    def why(self, now: float) -> str:
        """For people."""
        if self.kept:
            return self.kept
        if not self.usable and self.is_draft:
            return "read by a draft model that is not served with now"
        if not self.usable:
            return "made by another model, KV type or version"
        back = f"comes back from the {self.copy} tier" if self.copy else "computed again"
        back = "a draft model's, answers come without" if self.is_draft else f"{back} in {self.seconds:.2g} s"
        times = "once" if self.use.n == 1 else f"{self.use.n} times"
        return f"{back}; used {times}, last {_ago(self.age_s(now))} ago"


@dataclass(slots=True)
class Policy:
    """What the store knows beside the snapshots. `far`: of a name and its bytes, the tier that brings it back and in
    how many seconds; None for none."""

    area: Area
    marks: Marks
    speeds: SpeedBook
    clock: Callable[[], float] = time.time
    far: Callable[[EntryName, int], tuple[str, float] | None] = lambda _name, _nbytes: None
    _known: dict[EntryName, tuple[int, int, int]] = field(default_factory=dict[EntryName, tuple[int, int, int]])

    def candidates(self, served: str | None) -> list[Candidate]:
        """Everything published, in the order in which it would leave, what is kept behind. `served`: the digest of the
        fingerprint whose snapshots can be used; None takes all for usable. Of what draft models read the marks say
        it."""
        groups: dict[EntryName, list[EntryName]] = {}
        for name in published(self.area):
            groups.setdefault(EntryName(name.key.leaves_with, name.fingerprint_digest), []).append(name)
        pinned, now, served_draft = self.marks.pinned_keys(), self.clock(), self.marks.served_draft
        found = [
            self._candidate(name, parts, served_draft if name.key.kind == "draft" else served, pinned)
            for name, parts in groups.items()
        ]
        return sorted(found, key=lambda one: (bool(one.kept), *one.order(now)))

    def _candidate(
        self, name: EntryName, parts: list[EntryName], served: str | None, pinned: Container[SnapshotKey]
    ) -> Candidate:
        nbytes = sum(tree_size(self.area.published(part))[1] for part in parts)
        n_tokens, position = self._facts(name)
        seconds, copy = self._seconds(n_tokens), None
        if (far := self.far(name, nbytes)) is not None and far[1] <= seconds:
            copy, seconds = far
        kept = ""
        if name.key in pinned:
            kept = "pinned"
        elif any(Unused.is_used(self.area.published(part)) for part in parts):
            kept = "in use"
        usable = served is None or name.fingerprint_digest == served
        return Candidate(name, tuple(parts), nbytes, seconds, self.marks.use_of(name), position, usable, kept, copy)

    def _seconds(self, n_tokens: int) -> float:
        measured = self.speeds.recompute_s(n_tokens)
        return n_tokens / NOMINAL_TOKENS_PER_S if measured is None else measured

    def _facts(self, name: EntryName) -> tuple[int, int]:
        """Tokens and first position by the manifest, which is read once; 0 and 0 where it cannot be."""
        try:
            inode = os.stat(self.area.published(name)).st_ino
        except OSError:
            return 0, 0
        known = self._known.get(name)
        if known is None or known[0] != inode:
            try:
                manifest = read_stored_manifest(self.area.snapshots, name)
                known = inode, manifest.n_tokens, manifest.first_position
            except CacheStoreError:
                known = inode, 0, 0
            self._known[name] = known
        return known[1:]


@dataclass(frozen=True, slots=True)
class Eviction:
    """What left, or would, and what stays with the reason."""

    gone: list[Candidate] = field(default_factory=list[Candidate])
    kept: list[Candidate] = field(default_factory=list[Candidate])

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.gone)


class Evictor:
    """Takes snapshots off the disk by a policy. `may_leave` is asked before each, and may send it elsewhere first; what
    it refuses stays this time."""

    def __init__(self, policy: Policy, may_leave: Callable[[Candidate], bool] = lambda _: True) -> None:
        self._policy = policy
        self._may_leave = may_leave

    def plan(self, served: str | None, wanted_nbytes: int | None = None) -> Eviction:
        """What would leave for `wanted_nbytes`, all that can for None. Nothing is changed."""
        chosen = Eviction()
        for one in self._policy.candidates(served):
            if one.kept:
                chosen.kept.append(one)
            elif wanted_nbytes is None or chosen.nbytes < wanted_nbytes:
                chosen.gone.append(one)
        return chosen

    def evict(self, served: str | None, wanted_nbytes: int) -> Eviction:
        """Free at least so many bytes, or as many as there are. Raises StorageFailed."""
        plan = self.plan(served)
        done = Eviction(kept=plan.kept)
        for one in plan.gone:
            if done.nbytes >= wanted_nbytes:
                break
            (done.gone if self._leave(one) else done.kept).append(one)
        return done

    def make_room(self, name: EntryName, wanted_nbytes: int) -> bool:
        """Free so many bytes for a snapshot that is to be written; False, and nothing is gone, when there is not so
        much that may give way: for a turn nothing that was used just now does, for a draft other drafts and what cannot
        be used."""
        now = self._policy.clock()
        own, is_draft = EntryName(name.key.leaves_with, name.fingerprint_digest), name.key.kind == "draft"
        served = self._policy.marks.served if is_draft else name.fingerprint_digest
        usable = [one for one in self.plan(served).gone if one.name != own]
        if name.key.kind == "turn" or is_draft:
            usable = [one for one in usable if not one.is_recent(now)]
        if is_draft:
            usable = [one for one in usable if one.is_draft or not one.usable]
        if sum(one.nbytes for one in usable) < wanted_nbytes:
            return False
        freed = 0
        for one in usable:
            if freed >= wanted_nbytes:
                break
            freed += one.nbytes if self._leave(one) else 0
        return freed > 0

    def _leave(self, one: Candidate) -> bool:
        """False when it is used by now, or is not to go."""
        area = self._policy.area
        if not self._may_leave(one):
            return False
        # What was made from a document leaves before it.
        paths = [area.published(part) for part in sorted(one.parts, key=lambda part: part.key.source is None)]
        with storage_errors("evicting a snapshot"), Unused(*paths) as unused:
            if not unused.all:
                return False
            # First the mark: nobody finds nothing without a reason.
            area.tombstone(one.name.key).touch(mode=0o600)
            removed = area.discard(*paths)
            area.disk.remove(area.uses / one.name.flat)
        return removed != Removed()


def _ago(seconds: float) -> str:
    for unit, nbr in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= nbr:
            return f"{seconds / nbr:.0f} {unit}"
    return f"{seconds:.0f} s"
