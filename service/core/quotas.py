"""How much one owner may have, compute and ask at a time. What is asked through a link counts for who made the link."""

import math
from dataclasses import dataclass

from service.core.credentials import is_link
from service.db.repositories import UnitOfWork
from service.errors import LimitReached

DAY_S = 86_400
_STORAGE_RETRY_AFTER_S = 3600
_QUESTION_RETRY_AFTER_S = 2


@dataclass(frozen=True, slots=True)
class Quotas:
    """Of each owner; 0 is no limit. The methods are for units of work that are alone, so that two requests at once
    cannot both take the last of something. They raise LimitReached, whose code says which limit it is."""

    documents: int = 0
    nbytes: int = 0
    tokens_per_day: int = 0
    questions: int = 0

    async def check_upload(self, uow: UnitOfWork, who: str, nbytes: int, now: float) -> None:
        """Before a document of `nbytes` is kept."""
        await self._check_tokens(uow, who, now)
        if not self.documents and not self.nbytes:
            return
        count, held = await uow.documents.held_by_owner(who)
        if self.documents and count >= self.documents:
            raise LimitReached(
                f"You have {count:,} documents, and may have {self.documents:,}: delete one, then upload again.",
                code="quota_documents",
                retry_after_s=_STORAGE_RETRY_AFTER_S,
            )
        if self.nbytes and held + nbytes > self.nbytes:
            raise LimitReached(
                f"Your documents have {held:,} bytes and this one {nbytes:,}; together they may have {self.nbytes:,}: "
                "delete some, then upload again.",
                code="quota_bytes",
                retry_after_s=_STORAGE_RETRY_AFTER_S,
            )

    async def check_question(self, uow: UnitOfWork, who: str, now: float) -> None:
        """Before an answer begins."""
        account = await account_of(uow, who)
        await self._check_tokens(uow, account, now, who=who)
        if self.questions and (running := await uow.turns.running_for(account)) >= self.questions:
            raise LimitReached(
                f"You have {running:,} questions being answered, and may have {self.questions:,} at a time."
                if account == who
                else "As many questions are being answered as may be at a time for whoever made this link.",
                code="quota_questions",
                retry_after_s=_QUESTION_RETRY_AFTER_S,
            )

    async def _check_tokens(self, uow: UnitOfWork, account: str, now: float, *, who: str | None = None) -> None:
        """`who` is told the numbers only of their own account: how much its maker computes is not a link's to know."""
        if not self.tokens_per_day:
            return
        used = await uow.records.tokens(account, day_of(now))
        if used >= self.tokens_per_day:
            raise LimitReached(
                f"{used:,} tokens were computed for you today (UTC), and {self.tokens_per_day:,} a day may be. What is "
                "reused from snapshots does not count."
                if who in (None, account)
                else "As many tokens were computed today (UTC) as may be for whoever made this link.",
                code="quota_tokens_per_day",
                retry_after_s=math.ceil((day_of(now) + 1) * DAY_S - now),
            )


async def count_tokens(uow: UnitOfWork, who: str, tokens: int, now: float) -> None:
    """Add to what was computed for somebody today. In a unit of work that is alone."""
    if tokens > 0:
        await uow.records.add_tokens(await account_of(uow, who), day_of(now), tokens)


async def account_of(uow: UnitOfWork, who: str) -> str:
    """Whose quota it is: their own, or that of who made the link."""
    share = await uow.shares.get(who) if is_link(who) else None
    return share.created_by if share else who


def day_of(now: float) -> int:
    """Days since the epoch, UTC."""
    return int(now // DAY_S)
