"""Prompts seen before, stored responses, uploads in parts; the digest of documents' text, and what files are for."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("documents", sa.Column("text_digest", sa.String(32)))
    op.add_column("documents", sa.Column("purpose", sa.String(16), nullable=False, server_default=""))
    op.create_index("ix_documents_owner_text", "documents", ["owner_id", "text_digest"])
    op.add_column("sessions", sa.Column("origin", sa.String(16), nullable=False, server_default=""))
    op.create_table(
        "prompts",
        sa.Column("owner_id", sa.String(64), primary_key=True),
        sa.Column("digest", sa.String(32), primary_key=True),
        sa.Column("seen", sa.Integer(), nullable=False),
        sa.Column("document_id", sa.String(64)),
        sa.Column("last_seen_at", sa.Double(), nullable=False),
    )
    op.create_index("ix_prompts_last_seen", "prompts", ["last_seen_at"])
    _responses()
    _uploads()


def downgrade() -> None:
    for table in ("uploads", "responses", "prompts"):
        op.drop_table(table)
    op.drop_column("sessions", "origin")
    op.drop_index("ix_documents_owner_text", "documents")
    op.drop_column("documents", "purpose")
    op.drop_column("documents", "text_digest")


def _responses() -> None:
    op.create_table(
        "responses",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner_id", sa.String(64), nullable=False),
        sa.Column("session_id", sa.String(64), sa.ForeignKey("sessions.id", ondelete="CASCADE"), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_index("ix_responses_session", "responses", ["session_id"])


def _uploads() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner_id", sa.String(64), nullable=False),
        sa.Column("filename", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(16), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("parts", sa.JSON(), nullable=False),
        sa.Column("document_id", sa.String(64)),
        sa.Column("expires_after_s", sa.Integer()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
    )
    op.create_index("ix_uploads_owner", "uploads", ["owner_id"])
    op.create_index("ix_uploads_expires", "uploads", ["expires_at"])
