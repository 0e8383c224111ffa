"""Sessions over several documents."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "session_documents",
        sa.Column("session_id", sa.String(64), sa.ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("ordinal", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("document_id", sa.String(64), sa.ForeignKey("documents.id", ondelete="CASCADE"), nullable=False),
    )
    op.create_index("ix_session_documents_document", "session_documents", ["document_id"])
    op.execute(
        "INSERT INTO session_documents (session_id, ordinal, document_id) SELECT id, 0, document_id FROM sessions"
    )


def downgrade() -> None:
    # Those over several documents have no place in the tables of before.
    op.execute("DELETE FROM sessions WHERE id IN (SELECT session_id FROM session_documents WHERE ordinal > 0)")
    op.drop_index("ix_session_documents_document", "session_documents")
    op.drop_table("session_documents")
