"""Bodies of the document calls."""

from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec

from service.api.schemas.limits import PRINTABLE, SAID_SOMETHING, limited
from service.api.schemas.times import shown, shown_exactly
from service.core.artifacts import Place, Removed
from service.core.documents import DocumentChanges, DocumentView
from service.core.retention import stored_policy
from service.core.statuses import READY
from service.core.uploads import MAX_TITLE_CHARS, MAX_TTL_S
from service.db.models import DocumentRow, PageRow

T = TypeVar("T")
TITLE = [{"pattern": PRINTABLE}, {"pattern": SAID_SOMETHING}]


class ProgressBody(msgspec.Struct, frozen=True):
    """`done` of `total` `unit` of `stage`; `eta_s` is null until a rate is known."""

    stage: str
    done: int
    total: int
    unit: str
    eta_s: float | None


class RetentionBody(msgspec.Struct, frozen=True):
    """What was chosen. `preset`: `full`, `balanced`, `small`, `custom`; `automatic`: without being asked for.

    Of a document that is not kept whole: tokens that stay in memory (`sink`, `summary`, `window`), and how it was read,
    in `n_segments` parts of at most `segment_tokens` (0: in one) behind the same sinks. A question brings back up to
    `fetch_tokens` more.
    """

    preset: str
    automatic: bool
    sink_tokens: int
    summary_tokens: int
    window_tokens: int
    segment_tokens: int
    n_segments: int
    fetch_tokens: int


class PlaceBody(msgspec.Struct, frozen=True):
    """`tier`: `disk`, `redis` or `object`; `state`: `ready`, or `pending` while it is being sent. `known_at`: when a
    tier beyond the disk was last seen to have it."""

    tier: str
    state: str
    known_at: datetime | None


class SnapshotBody(msgspec.Struct, frozen=True):
    """`state`: `absent`, `building`, `ready`, `stale`, `rebuilding`. `prefilled_tokens`, `build_s`: of its last build.

    `retention` is null until it was chosen. `resident_tokens` and `resident_nbytes`: what of the document is in memory
    while it is asked about, the latter null when that is all of it; `index_nbytes`: what finds the rest. `tiers`: where
    the snapshot was put; one that left the disk to make room comes back from the others.
    """

    state: str
    fingerprint: str | None
    kv_type: str | None
    nbytes: int | None
    prefilled_tokens: int | None
    build_s: float | None
    retention: RetentionBody | None
    resident_tokens: int | None
    resident_nbytes: int | None
    index_nbytes: int | None
    tiers: list[PlaceBody]


class DocumentError(msgspec.Struct, frozen=True):
    """Why a document failed or was cancelled, and what to do."""

    code: str
    message: str


class DocumentBody(msgspec.Struct, frozen=True):
    """A document. `access`: what you may do with it, everything as its `owner`, `ask`, or only `read`. `warnings` are
    sentences about pages that cannot be asked about. `retention` is what was asked for, `snapshot.retention` what was
    chosen."""

    id: str
    title: str
    filename: str
    media_type: str
    nbytes: int
    sha256: str
    page_count: int | None
    token_count: int | None
    status: str
    progress: ProgressBody
    snapshot: SnapshotBody
    retention: dict[str, Any]
    visibility: str
    access: str
    pinned: bool
    warnings: list[str]
    created_at: datetime
    expires_at: datetime | None
    error: DocumentError | None


class DocumentList(msgspec.Struct, frozen=True):
    """Newest first; `has_more` says whether `after` the last one there are more."""

    data: list[DocumentBody]
    has_more: bool


class DocumentPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be changed. `ttl_s` counts from now; null means that the document does not expire."""

    title: Annotated[str, limited(maxLength=MAX_TITLE_CHARS, allOf=TITLE)] | msgspec.UnsetType = msgspec.UNSET
    ttl_s: Annotated[int | None, limited(minimum=1, maximum=MAX_TTL_S)] | msgspec.UnsetType = msgspec.UNSET
    pinned: bool | msgspec.UnsetType = msgspec.UNSET
    visibility: Annotated[str, limited(enum=["private"])] | msgspec.UnsetType = msgspec.UNSET

    def changes(self) -> DocumentChanges:
        return DocumentChanges(
            title=_given(self.title),
            pinned=_given(self.pinned),
            visibility=_given(self.visibility),
            set_ttl=self.ttl_s is not msgspec.UNSET,
            ttl_s=_given(self.ttl_s),
        )


def _given(value: T | msgspec.UnsetType) -> T | None:
    return None if isinstance(value, msgspec.UnsetType) else value


class PageBody(msgspec.Struct, frozen=True):
    """Tokens [token_start, token_end) of the document are those of this page; `label` is its own name."""

    document_id: str
    number: int
    label: str | None
    text: str
    token_start: int
    token_end: int


class RemovedBody(msgspec.Struct, frozen=True):
    tier: str
    objects: int
    nbytes: int


class Receipt(msgspec.Struct, frozen=True):
    """What a deletion removed, tier by tier."""

    removed: list[RemovedBody]


def document_body(view: DocumentView) -> DocumentBody:
    row, progress = view.row, view.progress
    return DocumentBody(
        id=row.id,
        title=row.title,
        filename=row.filename,
        media_type=row.media_type,
        nbytes=row.nbytes,
        sha256=row.sha256,
        page_count=row.page_count,
        token_count=row.token_count,
        status=view.status,
        progress=ProgressBody(progress.stage, progress.done, progress.total, progress.unit, progress.eta_s),
        snapshot=_snapshot_body(row, view.tiers),
        retention=row.retention,
        visibility=row.visibility,
        access=view.access,
        pinned=row.pinned,
        warnings=row.warnings,
        created_at=shown_exactly(row.created_at),
        expires_at=shown(row.expires_at),
        error=DocumentError(row.error_code, row.error_detail or "") if row.error_code else None,
    )


def page_body(row: PageRow) -> PageBody:
    return PageBody(row.document_id, row.number, row.label, row.text, row.token_start, row.token_end)


def receipt(removed: list[Removed]) -> Receipt:
    return Receipt([RemovedBody(part.tier, part.objects, part.nbytes) for part in removed])


def _snapshot_body(row: DocumentRow, tiers: dict[str, Place]) -> SnapshotBody:
    return SnapshotBody(
        # One that was evicted, and is nowhere else, is computed again when it is asked about.
        state="absent" if row.snapshot_state == "ready" and not tiers else row.snapshot_state,
        fingerprint=row.snapshot_fingerprint,
        kv_type=row.snapshot_kv_type,
        nbytes=row.snapshot_nbytes,
        prefilled_tokens=row.snapshot_prefilled_tokens,
        build_s=row.snapshot_build_s,
        retention=_retention_body(row),
        resident_tokens=row.snapshot_resident_tokens,
        resident_nbytes=row.snapshot_resident_nbytes,
        index_nbytes=row.snapshot_index_nbytes,
        tiers=[PlaceBody(tier, place.state, shown(place.known_at)) for tier, place in tiers.items()],
    )


def _retention_body(row: DocumentRow) -> RetentionBody | None:
    """Of documents older than the choice it is known too: they are kept whole."""
    if row.policy is None and row.status != READY:
        return None
    return RetentionBody(**stored_policy(row.policy).stored())
