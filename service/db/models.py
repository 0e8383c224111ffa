"""Tables. Text of documents, questions and answers lives here and on disk, never in logs.

All times are UTC seconds since the epoch. Ids are prefixed random strings made by `service.core.ids`.
"""

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, LargeBinary, String, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

_RUNNING = text("status = 'running'")


class Base(DeclarativeBase):
    type_annotation_map = {dict: JSON, list: JSON}  # noqa: RUF012 - SQLAlchemy reads this class attribute


class DocumentRow(Base):
    """One uploaded document. `status` only moves forward; `snapshot_state` is apart (REST contract).

    `dedupe_key` = digest of the bytes and the settings that change the snapshot: the same upload twice is one
    row. A failed or cancelled document's is its own id, so that the same bytes can be tried again.
    """

    __tablename__ = "documents"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner_id: Mapped[str] = mapped_column(String(64))
    dedupe_key: Mapped[str] = mapped_column(String(64))
    title: Mapped[str]
    filename: Mapped[str]
    media_type: Mapped[str] = mapped_column(default="")
    nbytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    visibility: Mapped[str] = mapped_column(default="private")
    purpose: Mapped[str] = mapped_column(String(16), default="", server_default="")
    """What it was sent for as a file of the OpenAI-compatible API; `prompt` when the server made it of a repeated
    prompt, `blank` of none; else empty."""
    retention: Mapped[dict] = mapped_column(default=dict)
    """What its owner asked for (`service.core.wishes`)."""
    policy: Mapped[dict | None] = mapped_column(default=None)
    """What was chosen (`service.core.retention`); None before its text is known, and where there was no choice yet."""
    pinned: Mapped[bool] = mapped_column(default=False)
    status: Mapped[str] = mapped_column(default="queued")
    progress_done: Mapped[int] = mapped_column(default=0)
    progress_total: Mapped[int] = mapped_column(default=0)
    progress_unit: Mapped[str] = mapped_column(default="pages")
    progress_eta_s: Mapped[float | None] = mapped_column(default=None)
    page_count: Mapped[int | None] = mapped_column(default=None)
    token_count: Mapped[int | None] = mapped_column(default=None)
    token_ids: Mapped[bytes | None] = mapped_column(LargeBinary, default=None, deferred=True)
    """Little-endian int32 tokens of the snapshot prompt: a lost snapshot is rebuilt token for token."""
    token_digest: Mapped[str | None] = mapped_column(String(64), default=None)
    text_digest: Mapped[str | None] = mapped_column(String(32), default=None)
    """Of its pages' text without white space: a prompt that repeats the text is known by it."""
    template_digest: Mapped[str | None] = mapped_column(String(64), default=None)
    """Tokenizer and prompt template that made `token_ids`; other ones tokenize again from the pages' text."""
    warnings: Mapped[list] = mapped_column(default=list)
    error_code: Mapped[str | None] = mapped_column(default=None)
    error_detail: Mapped[str | None] = mapped_column(default=None)
    snapshot_state: Mapped[str] = mapped_column(default="absent")
    snapshot_fingerprint: Mapped[str | None] = mapped_column(default=None)
    snapshot_kv_type: Mapped[str | None] = mapped_column(default=None)
    snapshot_nbytes: Mapped[int | None] = mapped_column(BigInteger, default=None)
    snapshot_prefilled_tokens: Mapped[int | None] = mapped_column(default=None)
    snapshot_build_s: Mapped[float | None] = mapped_column(default=None)
    snapshot_resident_tokens: Mapped[int | None] = mapped_column(default=None)
    snapshot_resident_nbytes: Mapped[int | None] = mapped_column(BigInteger, default=None)
    snapshot_index_nbytes: Mapped[int | None] = mapped_column(BigInteger, default=None)
    lease_owner: Mapped[str | None] = mapped_column(String(64), default=None)
    """The process that works on it; nobody, when there is no such process any more."""
    created_at: Mapped[float]
    updated_at: Mapped[float]
    expires_at: Mapped[float | None] = mapped_column(default=None)

    __table_args__ = (
        UniqueConstraint("owner_id", "dedupe_key", name="uq_documents_owner_dedupe"),
        Index("ix_documents_owner_created", "owner_id", "created_at"),
        Index("ix_documents_status", "status"),
        Index("ix_documents_owner_text", "owner_id", "text_digest"),
    )


class PageRow(Base):
    """The normalized text of one page and its range of the document's token ids."""

    __tablename__ = "pages"

    document_id: Mapped[str] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    label: Mapped[str | None] = mapped_column(default=None)
    text: Mapped[str]
    token_start: Mapped[int] = mapped_column(default=0)
    token_end: Mapped[int] = mapped_column(default=0)


class SessionRow(Base):
    """A conversation over one or several documents; `document_id` is the first of `documents`."""

    __tablename__ = "sessions"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner_id: Mapped[str] = mapped_column(String(64))
    document_id: Mapped[str] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"))
    title: Mapped[str] = mapped_column(default="")
    instructions: Mapped[str] = mapped_column(default="", server_default="")
    """How its answers are wanted: said with every question, after the document."""
    forked_from: Mapped[str | None] = mapped_column(default=None)
    origin: Mapped[str] = mapped_column(String(16), default="", server_default="")
    """`chat` when a request of the OpenAI-compatible API began it: it goes some time after its last question."""
    created_at: Mapped[float]
    updated_at: Mapped[float]
    documents: Mapped[list["SessionDocumentRow"]] = relationship(
        order_by="SessionDocumentRow.ordinal", lazy="selectin", cascade="all, delete-orphan", passive_deletes=True
    )

    __table_args__ = (
        Index("ix_sessions_owner_created", "owner_id", "created_at"),
        Index("ix_sessions_document", "document_id"),
    )

    @property
    def document_ids(self) -> list[str]:
        """In the order in which they were given."""
        return [document.document_id for document in self.documents]


class SessionDocumentRow(Base):
    """One of the documents of a session, in their order."""

    __tablename__ = "session_documents"

    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True)
    ordinal: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    document_id: Mapped[str] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"))

    __table_args__ = (Index("ix_session_documents_document", "document_id"),)


class TurnRow(Base):
    """One question and its answer. `id` is the answer id; `kv_id` names the stored KV (a fork shares it).

    `token_ids` (little-endian int32) are the tokens whose KV the turn left in the session, `pending_ids`
    those the next question must begin with. `spans`: [first, length] of the document's tokens that were fetched for it;
    of another document of the session than the first also its place among them.
    `status`: `running`, `done`, `failed`, `cancelled`.
    """

    __tablename__ = "turns"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    ordinal: Mapped[int]
    question: Mapped[str]
    answer: Mapped[str] = mapped_column(default="")
    status: Mapped[str] = mapped_column(default="running")
    finish_reason: Mapped[str | None] = mapped_column(default=None)
    error_code: Mapped[str | None] = mapped_column(default=None)
    error_detail: Mapped[str | None] = mapped_column(default=None)
    kv_id: Mapped[str | None] = mapped_column(default=None)
    token_ids: Mapped[bytes] = mapped_column(LargeBinary, default=b"", deferred=True)
    pending_ids: Mapped[bytes] = mapped_column(LargeBinary, default=b"", deferred=True)
    parameters: Mapped[dict] = mapped_column(default=dict)
    citations: Mapped[list] = mapped_column(default=list)
    unsupported: Mapped[list] = mapped_column(default=list, server_default="[]")
    provenance: Mapped[list] = mapped_column(default=list)
    spans: Mapped[list] = mapped_column(default=list, server_default="[]")
    notice: Mapped[str | None] = mapped_column(default=None)
    usage: Mapped[dict] = mapped_column(default=dict)
    cache: Mapped[dict] = mapped_column(default=dict)
    timings: Mapped[dict] = mapped_column(default=dict)
    lease_owner: Mapped[str | None] = mapped_column(String(64), default=None)
    """The process that answers, while it runs."""
    followed: Mapped[int] = mapped_column(default=0, server_default="0")
    """Counted up by other processes while somebody reads the answer there."""
    created_at: Mapped[float]

    __table_args__ = (
        UniqueConstraint("session_id", "ordinal", name="uq_turns_session_ordinal"),
        Index("ix_turns_kv", "kv_id"),
        Index("ix_turns_running", "lease_owner", sqlite_where=_RUNNING, postgresql_where=_RUNNING),
    )


class ProcessRow(Base):
    """A process that shares the database. `beat` counts its signs of life: who does not see it change for a while, by
    a clock of its own, removes the row, and all that the process had leased is free."""

    __tablename__ = "processes"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    beat: Mapped[int] = mapped_column(BigInteger, default=0)
    started_at: Mapped[float]


class DeletionRow(Base):
    """A deletion under way: written with the removal of the document's rows, gone when every tier is clean.

    `kv_ids` and `session_ids` name what the removed turns left in the store and in the engine; `removed` is
    the part of the receipt that is done.
    """

    __tablename__ = "deletions"

    document_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner_id: Mapped[str] = mapped_column(String(64))
    kv_ids: Mapped[list] = mapped_column(default=list)
    session_ids: Mapped[list] = mapped_column(default=list)
    removed: Mapped[list] = mapped_column(default=list)
    created_at: Mapped[float]
