"""Names of snapshots. Ids come from outside: they are checked before they become part of a path."""

import re
from dataclasses import dataclass

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{16}")
DIRECTORIES = {"document": "documents", "resident": "residents", "slots": "slots", "draft": "drafts", "turn": "turns"}
"""Of each kind the directory below an owner's."""
KINDS = tuple(DIRECTORIES)
_SOURCES = {"resident": "document", "slots": "document", "draft": "document"}


@dataclass(frozen=True, slots=True, order=True)
class SnapshotKey:
    """Whose snapshot of what: a `document`, of a windowed one (under the same id) the `resident` rows that all heads
    share and the summary `slots` that each head has for itself, of any (under the same id) what a `draft` model read of
    its tokens, or one `turn` of a session. Two owners never share a key.

    Raises ValueError for ids other than 1 to 64 letters, digits, ``_`` and ``-``.
    """

    owner_id: str
    kind: str
    id: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a snapshot is of one of {', '.join(KINDS)}, not of {self.kind!r}")
        for text in (self.owner_id, self.id):
            if not _ID.fullmatch(text):
                raise ValueError(f"an id is 1 to 64 letters, digits, '_' and '-', not {text[:80]!r}")

    @property
    def parts(self) -> tuple[str, str, str]:
        """Directories below the store's `snapshots` that lead to this key."""
        return self.owner_id, DIRECTORIES[self.kind], self.id

    @property
    def text(self) -> str:
        return f"{self.owner_id}/{self.kind}/{self.id}"

    def of_kind(self, kind: str) -> "SnapshotKey":
        """The key of the same owner and id."""
        return SnapshotKey(self.owner_id, kind, self.id)

    @property
    def source(self) -> "SnapshotKey | None":
        """The key of the snapshot that this one is made from: of its bytes, a draft of its tokens."""
        kind = _SOURCES.get(self.kind)
        return None if kind is None else self.of_kind(kind)

    @property
    def leaves_with(self) -> "SnapshotKey":
        """The key of the snapshot together with which this one is evicted: a draft goes alone, and sooner."""
        return self if self.kind == "draft" else self.source or self

    @property
    def made(self) -> "tuple[SnapshotKey, ...]":
        """Keys of what is made from this one and does not outlive it."""
        return tuple(self.of_kind(kind) for kind, source in _SOURCES.items() if source == self.kind)


@dataclass(frozen=True, slots=True, order=True)
class EntryName:
    """A key and the digest of a fingerprint: names one snapshot directory."""

    key: SnapshotKey
    fingerprint_digest: str

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.fingerprint_digest):
            raise ValueError(f"a fingerprint digest is 16 hex digits, not {self.fingerprint_digest[:80]!r}")

    @property
    def parts(self) -> tuple[str, ...]:
        return *self.key.parts, self.fingerprint_digest

    @property
    def flat(self) -> str:
        """One file name; ``~`` cannot be part of an id."""
        return f"{flat_key(self.key)}~{self.fingerprint_digest}"


def flat_key(key: SnapshotKey) -> str:
    return f"{key.owner_id}~{key.kind}~{key.id}"


def parse_flat_key(flat: str) -> SnapshotKey | None:
    """The inverse of `flat_key`."""
    parts = flat.split("~")
    try:
        return SnapshotKey(*parts) if len(parts) == 3 else None
    except ValueError:
        return None


def parse_flat(name: str) -> EntryName | None:
    """The inverse of `EntryName.flat`; further ``~`` parts and a suffix after a dot are ignored."""
    parts = name.partition(".")[0].split("~")
    if len(parts) < 4:
        return None
    try:
        return EntryName(SnapshotKey(parts[0], parts[1], parts[2]), parts[3])
    except ValueError:
        return None
