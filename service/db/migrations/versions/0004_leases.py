"""Which process works on a document or an answer."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "processes",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
    )
    op.add_column("documents", sa.Column("lease_owner", sa.String(64)))
    op.add_column("turns", sa.Column("lease_owner", sa.String(64)))
    op.add_column("turns", sa.Column("followed", sa.Integer(), nullable=False, server_default="0"))
    # Few answers run at a time, of very many that there were.
    running = sa.text("status = 'running'")
    op.create_index("ix_turns_running", "turns", ["lease_owner"], sqlite_where=running, postgresql_where=running)


def downgrade() -> None:
    op.drop_index("ix_turns_running", "turns")
    op.drop_column("turns", "followed")
    op.drop_column("turns", "lease_owner")
    op.drop_column("documents", "lease_owner")
    op.drop_table("processes")
