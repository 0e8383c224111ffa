"""What a builder builds: the name, the tokens, and everything that must agree later."""

from dataclasses import asdict, dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from cache_store.fingerprint import Fingerprint, token_digest
from cache_store.keys import EntryName
from cache_store.layout import KVLayout
from cache_store.manifest import Canary, LayoutFields, Manifest, ResidentRows, SegmentFields
from cache_store.segments import WHOLE, Segments
from cache_store.shards import FORMAT_VERSION, Geometry, plan_shards
from cache_store.slots import Counts, SlotCounts, check_slots

MOST_POSITIONS = 1 << 40


@dataclass(frozen=True)
class BuildSubject:
    """The subject of one build. `token_ids`: int32, those of the rows for a resident snapshot or one of slots.

    `next_position` and `last_position` belong to a resident snapshot, whose rows are picked, and to no other,
    `slot_counts` to one of slots. Raises ValueError for tokens, positions or counts that cannot be.
    """

    name: EntryName
    fingerprint: Fingerprint
    layout: KVLayout
    token_ids: npt.NDArray[np.int32]
    context_digest: str = ""
    first_position: int = 0
    segments: Segments = WHOLE
    next_position: int | None = None
    last_position: int | None = None
    slot_counts: Counts | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.first_position <= MOST_POSITIONS:
            raise ValueError(f"position {self.first_position} cannot be")
        self.segments.check_blocks(self.layout)
        if self.cut != WHOLE and (self.name.key.kind != "document" or self.first_position):
            raise ValueError("only a document is cut into segments, and it begins at position 0")
        self._check_rows()
        if (self.slot_counts is not None) != (self.name.key.kind == "slots"):
            raise ValueError("slots, and only they, are counted by head")
        if self.slot_counts is not None:
            check_slots(self.slot_counts, self.layout, self.n_tokens)

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def cut(self) -> Segments:
        """The segments as they are stored: for a document that is a single one, none."""
        return self.segments.of_length(self.n_tokens)

    def geometry(self) -> Geometry:
        return plan_shards(self.name, self.layout, self.n_tokens)

    def line(self) -> bytes:
        """The journal's first line: a journal with another one is not taken up again."""
        fields: dict[str, object] = {
            "format_version": FORMAT_VERSION,
            "key": self.name.key.text,
            "fingerprint": asdict(self.fingerprint),
            "layout": LayoutFields.of(self.layout),
            "token_digest": token_digest(self.token_ids.tobytes()),
            "context_digest": self.context_digest,
            "first_position": self.first_position,
        }
        segments = SegmentFields.of(self.cut)
        # Without segments the line is that of earlier versions, whose builds go on.
        return msgspec.json.encode(fields if segments is None else fields | {"segments": segments})

    def manifest(self, geometry: Geometry, checksums: bytes, created_at: float, canary: Canary | None) -> Manifest:
        key = self.name.key
        return Manifest(
            owner_id=key.owner_id,
            kind=key.kind,
            id=key.id,
            fingerprint=asdict(self.fingerprint),
            layout=LayoutFields.of(self.layout),
            n_tokens=self.n_tokens,
            token_digest=token_digest(self.token_ids.tobytes()),
            context_digest=self.context_digest,
            next_position=self._next_position(),
            blocks=self.cut.table(self.layout, self.n_tokens, self.first_position),
            shard_nbytes=[shard.nbytes for shard in geometry.shards],
            checksums=checksums,
            created_at=created_at,
            retention=SegmentFields.of(self.cut),
            sections=self._sections(canary),
        )

    def _next_position(self) -> int:
        if self.next_position is not None:
            return self.next_position
        return self.first_position + self.segments.next_position(self.n_tokens)

    def _sections(self, canary: Canary | None) -> dict[str, msgspec.Raw]:
        sections: dict[str, msgspec.Struct] = {} if canary is None else {"canary": canary}
        if self.last_position is not None:
            sections["resident"] = ResidentRows(self.last_position)
        if self.slot_counts is not None:
            sections["slots"] = SlotCounts([list(of_layer) for of_layer in self.slot_counts])
        return {name: msgspec.Raw(msgspec.json.encode(section)) for name, section in sections.items()}

    def _check_rows(self) -> None:
        given = self.next_position, self.last_position
        if self.name.key.kind != "resident":
            if given != (None, None):
                raise ValueError("positions are given for resident rows only; others follow from the tokens")
            return
        following, last = given
        if following is None or last is None:
            raise ValueError("resident rows need a next and a last position")
        if self.first_position or not 0 <= last < following <= MOST_POSITIONS:
            raise ValueError(f"resident rows cannot end at position {last}, with {following} the next one")
