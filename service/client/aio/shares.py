"""With whom documents and sessions are shared."""

from typing import Literal

from service.client import calls
from service.client.aio.transport import AsyncTransport
from service.client.models import Share


class AsyncShares:
    """`client.documents.shares` and `client.sessions.shares`; `id` is that of a document or session of yours."""

    def __init__(self, transport: AsyncTransport, what: calls.Target) -> None:
        self._transport = transport
        self._what: calls.Target = what

    async def create(
        self,
        id: str,
        kind: Literal["user", "organization", "link"],
        *,
        user: str | None = None,
        access: Literal["ask", "read"] = "ask",
        ttl_s: int | None = None,
    ) -> Share:
        """Share it with a `user` of your organization, by name, with the organization, or by a link, whose `token` is
        told only now: it is a key. Raises Invalid when there is no such user."""
        return await self._transport.send(calls.create_share(self._what, id, kind, user, access, ttl_s))

    async def list(self, id: str) -> list[Share]:
        """Oldest first."""
        return (await self._transport.send(calls.list_shares(self._what, id))).data

    async def revoke(self, id: str, share_id: str) -> None:
        """From the next request on nobody sees anything by it."""
        await self._transport.send(calls.revoke_share(self._what, id, share_id))
