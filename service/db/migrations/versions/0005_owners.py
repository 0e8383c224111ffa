"""Organizations, users, keys, shares, audit, usage, idempotency keys; instructions of a session."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _people()
    _shares()
    _records()
    op.add_column("sessions", sa.Column("instructions", sa.String(), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("sessions", "instructions")
    for table in ("idempotency_keys", "usage_days", "audit", "shares", "api_keys", "users", "organizations"):
        op.drop_table(table)


def _people() -> None:
    organizations = op.create_table(
        "organizations",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(100), nullable=False, unique=True),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    users = op.create_table(
        "users",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("organization_id", sa.String(64), sa.ForeignKey("organizations.id"), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.UniqueConstraint("organization_id", "name", name="uq_users_organization_name"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("user_id", sa.String(64), sa.ForeignKey("users.id"), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("origin", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("last_used_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
    )
    op.create_index("ix_api_keys_user", "api_keys", ["user_id"])
    # All that there is was made without a key, by whoever runs the server.
    op.bulk_insert(organizations, [{"id": "local", "name": "local", "created_at": time.time()}])
    op.bulk_insert(users, [{"id": "local", "organization_id": "local", "name": "local", "created_at": time.time()}])


def _shares() -> None:
    op.create_table(
        "shares",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("document_id", sa.String(64), sa.ForeignKey("documents.id", ondelete="CASCADE")),
        sa.Column("session_id", sa.String(64), sa.ForeignKey("sessions.id", ondelete="CASCADE")),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("subject", sa.String(64), nullable=False),
        sa.Column("access", sa.String(8), nullable=False),
        sa.Column("digest", sa.String(64)),
        sa.Column("created_by", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.UniqueConstraint("document_id", "subject", name="uq_shares_document_subject"),
        sa.UniqueConstraint("session_id", "subject", name="uq_shares_session_subject"),
    )
    op.create_index("ix_shares_subject", "shares", ["subject"])


def _records() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(64)),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("target", sa.String(64), nullable=False),
        sa.Column("other", sa.String(64)),
    )
    op.create_index("ix_audit_at", "audit", ["at"])
    op.create_index("ix_audit_user", "audit", ["user_id", "at"])
    op.create_table(
        "usage_days",
        sa.Column("user_id", sa.String(64), primary_key=True),
        sa.Column("day", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("owner_id", sa.String(64), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("target", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_index("ix_idempotency_keys_created", "idempotency_keys", ["created_at"])
