"""Bodies of the share calls."""

from datetime import datetime
from typing import Annotated

import msgspec

from service.api.schemas.limits import limited
from service.api.schemas.times import shown, shown_exactly
from service.core.sharing import KINDS, LEVELS, NewShare, Shared
from service.core.uploads import MAX_TTL_S


class ShareRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`with`: `user` (`user` is the name), `organization`, or `link`. `access`: `read`, or `ask`, which includes it."""

    kind: Annotated[str, limited(enum=list(KINDS))] = msgspec.field(name="with")
    access: Annotated[str, limited(enum=list(LEVELS))] = "ask"
    user: str | None = None
    ttl_s: Annotated[int | None, limited(minimum=1, maximum=MAX_TTL_S)] = None

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
