"""Tables of the OpenAI-compatible API: stored responses, uploads in parts, and prompts that were seen before."""

from sqlalchemy import BigInteger, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models import Base


class PromptRow(Base):
    """A long text that stood in somebody's prompts. `digest` is that of `service.core.chats.texts`; the text itself
    is not kept. `document_id`: what was made of it, once it had come often enough."""

    __tablename__ = "prompts"

    owner_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    digest: Mapped[str] = mapped_column(String(32), primary_key=True)
    seen: Mapped[int] = mapped_column(default=0)
    document_id: Mapped[str | None] = mapped_column(String(64), default=None)
    last_seen_at: Mapped[float]

    __table_args__ = (Index("ix_prompts_last_seen", "last_seen_at"),)


class ResponseRow(Base):
    """A response that may be retrieved, and gone on from. `id` is that of its turn; `request` what it shows again of
    how it was asked for."""

    __tablename__ = "responses"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner_id: Mapped[str] = mapped_column(String(64))
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    request: Mapped[dict] = mapped_column(default=dict)
    created_at: Mapped[float]

    __table_args__ = (Index("ix_responses_session", "session_id"),)


class UploadRow(Base):
    """A file that comes in parts. `status`: `pending`, `completed`, `cancelled`; the parts lie in a folder of its name.
    `parts` are their ids in the order in which they came, with their bytes; `expires_after_s` is of the file it
    becomes."""

    __tablename__ = "uploads"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner_id: Mapped[str] = mapped_column(String(64))
    filename: Mapped[str]
    purpose: Mapped[str] = mapped_column(String(16))
    nbytes: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(String(16), default="pending")
    parts: Mapped[list] = mapped_column(default=list)
    document_id: Mapped[str | None] = mapped_column(String(64), default=None)
    expires_after_s: Mapped[int | None] = mapped_column(default=None)
    created_at: Mapped[float]
    expires_at: Mapped[float]

    __table_args__ = (Index("ix_uploads_owner", "owner_id"), Index("ix_uploads_expires", "expires_at"))
