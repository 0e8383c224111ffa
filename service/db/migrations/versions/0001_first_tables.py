"""Documents, pages, sessions, turns, and deletions under way."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _documents()
    _pages()
    _sessions()
    _turns()
    _deletions()


def downgrade() -> None:
    for table in ("deletions", "turns", "sessions", "pages", "documents"):
        op.drop_table(table)


def _documents() -> None:
    op.create_table(
        "documents",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner_id", sa.String(64), nullable=False),
        sa.Column("dedupe_key", sa.String(64), nullable=False),
        sa.Column("title", sa.String(), nullable=False),
        sa.Column("filename", sa.String(), nullable=False),
        sa.Column("media_type", sa.String(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("visibility", sa.String(), nullable=False),
        sa.Column("retention", sa.JSON(), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("progress_done", sa.Integer(), nullable=False),
        sa.Column("progress_total", sa.Integer(), nullable=False),
        sa.Column("progress_unit", sa.String(), nullable=False),
        sa.Column("progress_eta_s", sa.Double()),
        sa.Column("page_count", sa.Integer()),
        sa.Column("token_count", sa.Integer()),
        sa.Column("token_ids", sa.LargeBinary()),
        sa.Column("token_digest", sa.String(64)),
        sa.Column("template_digest", sa.String(64)),
        sa.Column("warnings", sa.JSON(), nullable=False),
        sa.Column("error_code", sa.String()),
        sa.Column("error_detail", sa.String()),
        sa.Column("snapshot_state", sa.String(), nullable=False),
        sa.Column("snapshot_fingerprint", sa.String()),
        sa.Column("snapshot_kv_type", sa.String()),
        sa.Column("snapshot_nbytes", sa.BigInteger()),
        sa.Column("snapshot_prefilled_tokens", sa.Integer()),
        sa.Column("snapshot_build_s", sa.Double()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.UniqueConstraint("owner_id", "dedupe_key", name="uq_documents_owner_dedupe"),
    )
    op.create_index("ix_documents_owner_created", "documents", ["owner_id", "created_at"])
    op.create_index("ix_documents_status", "documents", ["status"])


def _pages() -> None:
    op.create_table(
        "pages",
        sa.Column("document_id", sa.String(64), sa.ForeignKey("documents.id", ondelete="CASCADE")),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("label", sa.String()),
        sa.Column("text", sa.String(), nullable=False),
        sa.Column("token_start", sa.Integer(), nullable=False),
        sa.Column("token_end", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("document_id", "number"),
    )


def _sessions() -> None:
    document = sa.ForeignKey("documents.id", ondelete="CASCADE")
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner_id", sa.String(64), nullable=False),
        sa.Column("document_id", sa.String(64), document, nullable=False),
        sa.Column("title", sa.String(), nullable=False),
        sa.Column("forked_from", sa.String()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
    )
    op.create_index("ix_sessions_owner_created", "sessions", ["owner_id", "created_at"])
    op.create_index("ix_sessions_document", "sessions", ["document_id"])


def _turns() -> None:
    session = sa.ForeignKey("sessions.id", ondelete="CASCADE")
    op.create_table(
        "turns",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("session_id", sa.String(64), session, nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("question", sa.String(), nullable=False),
        sa.Column("answer", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("finish_reason", sa.String()),
        sa.Column("error_code", sa.String()),
        sa.Column("error_detail", sa.String()),
        sa.Column("kv_id", sa.String()),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("pending_ids", sa.LargeBinary(), nullable=False),
        sa.Column("parameters", sa.JSON(), nullable=False),
        sa.Column("citations", sa.JSON(), nullable=False),
        sa.Column("provenance", sa.JSON(), nullable=False),
        sa.Column("usage", sa.JSON(), nullable=False),
        sa.Column("cache", sa.JSON(), nullable=False),
        sa.Column("timings", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.UniqueConstraint("session_id", "ordinal", name="uq_turns_session_ordinal"),
    )
    op.create_index("ix_turns_kv", "turns", ["kv_id"])


def _deletions() -> None:
    op.create_table(
        "deletions",
        sa.Column("document_id", sa.String(64), primary_key=True),
        sa.Column("owner_id", sa.String(64), nullable=False),
        sa.Column("kv_ids", sa.JSON(), nullable=False),
        sa.Column("session_ids", sa.JSON(), nullable=False),
        sa.Column("removed", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
