"""What is shared with the user `local` and with the organization `local`, whose ids are the same, is shared twice."""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_NAMES = {"uq_shares_document_subject": "document_id", "uq_shares_session_subject": "session_id"}


def upgrade() -> None:
    _unique("kind", "subject")


def downgrade() -> None:
    # The share with the organization gives way: the user's own is the more particular.
    op.execute(
        "DELETE FROM shares WHERE kind = 'organization' AND EXISTS (SELECT 1 FROM shares AS other WHERE "
        "other.kind = 'user' AND other.subject = shares.subject AND (other.document_id = shares.document_id "
        "OR other.session_id = shares.session_id))"
    )
    _unique("subject")


def _unique(*columns: str) -> None:
    with op.batch_alter_table("shares") as table:
        for name, target in _NAMES.items():
            table.drop_constraint(name, type_="unique")
            table.create_unique_constraint(name, [target, *columns])
