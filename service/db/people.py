"""Tables of who may do what: organizations, users, keys, shares; and what was done, used and asked before.

Nothing here holds a secret in the clear, or text of a document, a question or an answer.
"""

from sqlalchemy import BigInteger, ForeignKey, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models import Base

LOCAL = "local"
"""The user, and the organization, of a server without keys; the first key is theirs too."""


class OrganizationRow(Base):
    """Users who can share with each other by name."""

    __tablename__ = "organizations"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    created_at: Mapped[float]


class UserRow(Base):
    """Whoever owns documents and sessions: their `owner_id` is a user's id, or that of a link."""

    __tablename__ = "users"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"))
    name: Mapped[str] = mapped_column(String(100))
    created_at: Mapped[float]

    __table_args__ = (UniqueConstraint("organization_id", "name", name="uq_users_organization_name"),)


class KeyRow(Base):
    """An API key. `id` is the part before its point, `digest` the hash of the secret behind it. `origin`: `command`, or
    `settings` for the first one, which the operator's secret file has."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    name: Mapped[str] = mapped_column(String(100), default="")
    digest: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[list]
    origin: Mapped[str] = mapped_column(String(16), default="command")
    created_at: Mapped[float]
    expires_at: Mapped[float | None] = mapped_column(default=None)
    last_used_at: Mapped[float | None] = mapped_column(default=None)
    """Written some time after the use."""
    revoked_at: Mapped[float | None] = mapped_column(default=None)

    __table_args__ = (Index("ix_api_keys_user", "user_id"),)


class WebSessionRow(Base):
    """A browser that signed in: `id` and the hash of a secret, which its cookie has, stand for a key or a link."""

    __tablename__ = "web_sessions"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64))
    key_id: Mapped[str] = mapped_column(String(64))
    """Of a key, or of a share that is a link; whether it is valid still is looked up with every request."""
    created_at: Mapped[float]
    expires_at: Mapped[float]

    __table_args__ = (Index("ix_web_sessions_expires", "expires_at"),)


class ShareRow(Base):
    """A document, or a session with its documents, that others may see. Revoked is removed.

    `subject` is the id of a user or an organization; a link's is its own id, and `digest` the hash of its secret.
    `access`: `read`, or `ask`, which is more.
    """

    __tablename__ = "shares"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    document_id: Mapped[str | None] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"), default=None)
    session_id: Mapped[str | None] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), default=None)
    kind: Mapped[str] = mapped_column(String(16))
    subject: Mapped[str] = mapped_column(String(64))
    access: Mapped[str] = mapped_column(String(8))
    digest: Mapped[str | None] = mapped_column(String(64), default=None)
    created_by: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float]
    expires_at: Mapped[float | None] = mapped_column(default=None)

    __table_args__ = (
        UniqueConstraint("document_id", "kind", "subject", name="uq_shares_document_subject"),
        UniqueConstraint("session_id", "kind", "subject", name="uq_shares_session_subject"),
        Index("ix_shares_subject", "subject"),
    )


class AuditRow(Base):
    """Who did what: ids only. It outlives what it names, for as long as the operator wants."""

    __tablename__ = "audit"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    at: Mapped[float]
    user_id: Mapped[str] = mapped_column(String(64))
    key_id: Mapped[str | None] = mapped_column(String(64), default=None)
    action: Mapped[str] = mapped_column(String(32))
    target: Mapped[str] = mapped_column(String(64))
    other: Mapped[str | None] = mapped_column(String(64), default=None)
    """What the target belongs to, or with whom it was shared."""

    __table_args__ = (Index("ix_audit_at", "at"), Index("ix_audit_user", "user_id", "at"))


class UsageRow(Base):
    """Tokens that were computed for a user on a day (days since the epoch, UTC)."""

    __tablename__ = "usage_days"

    user_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tokens: Mapped[int] = mapped_column(BigInteger, default=0)


class RepeatRow(Base):
    """An `Idempotency-Key` that was used: what it made, and a digest of the request it came with."""

    __tablename__ = "idempotency_keys"

    owner_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    target: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float]

    __table_args__ = (Index("ix_idempotency_keys_created", "created_at"),)
