"""What was chosen for a document, what of it stays in memory, and what was fetched for a turn."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_COLUMNS = {
    "documents": ("policy", "snapshot_resident_tokens", "snapshot_resident_nbytes", "snapshot_index_nbytes"),
    "turns": ("spans", "notice"),
}


def upgrade() -> None:
    op.add_column("documents", sa.Column("policy", sa.JSON()))
    op.add_column("documents", sa.Column("snapshot_resident_tokens", sa.Integer()))
    op.add_column("documents", sa.Column("snapshot_resident_nbytes", sa.BigInteger()))
    op.add_column("documents", sa.Column("snapshot_index_nbytes", sa.BigInteger()))
    op.add_column("turns", sa.Column("spans", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("turns", sa.Column("notice", sa.String()))


def downgrade() -> None:
    # Not in a batch: that makes the table anew, and dropping the old one would remove all that refers to it.
    for table, columns in _COLUMNS.items():
        for column in columns:
            op.drop_column(table, column)
