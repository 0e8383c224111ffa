"""Bodies of the share calls."""

from datetime import datetime

import msgspec

from service.api.schemas.times import shown, shown_exactly
from service.core.sharing import NewShare, Shared


class ShareRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`with`: `user` (`user` is the name), `organization`, or `link`. `access`: `read`, or `ask`, which includes it."""

    kind: str = msgspec.field(name="with")
    access: str = "ask"
    user: str | None = None
    ttl_s: int | None = None

    def to_share(self) -> NewShare:
        return NewShare(self.kind, self.access, self.user, self.ttl_s)


class ShareBody(msgspec.Struct, frozen=True):
    """`name`: of the user or organization. `token`: of a link, only in the response that made it; whoever has it sends
    it as a key."""

    id: str
    kind: str = msgspec.field(name="with")
    name: str | None
    access: str
    created_at: datetime
    expires_at: datetime | None
    token: str | None


class ShareList(msgspec.Struct, frozen=True):
    """Oldest first."""

    data: list[ShareBody]


def share_body(shared: Shared) -> ShareBody:
    row = shared.row
    return ShareBody(
        id=row.id,
        kind=row.kind,
        name=shared.name,
        access=row.access,
        created_at=shown_exactly(row.created_at),
        expires_at=shown(row.expires_at),
        token=shared.token,
    )
