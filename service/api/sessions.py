"""`/v1/sessions`."""

from typing import Annotated

from litestar import Controller, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, QueryParameter

from service.api.described import LOCATION
from service.api.principal import FOR_ASKING
from service.api.problems import problem_responses
from service.api.schemas.sessions import (
    ForkRequest,
    NewSession,
    SessionBody,
    SessionDetail,
    SessionList,
    session_body,
    session_detail,
)
from service.core.keys import Principal
from service.core.services import Services
from service.core.sessions import MAX_PAGE
from service.errors import Forbidden


class SessionController(Controller):
    """Conversations over documents."""

    path = "/v1/sessions"
    tags = ("sessions",)

    @post(status_code=201, opt=FOR_ASKING, response_headers=LOCATION, responses=problem_responses(404, 409, 422, 507))
    async def create(
        self, services: NamedDependency[Services], owner_id: NamedDependency[str], data: JSONBody[NewSession]
    ) -> Response[SessionBody]:
        """Begin a conversation about a document that is ready, or about several."""
        row = await services.conversations.sessions.create(owner_id, data.document_ids, data.title, data.instructions)
        return Response(session_body(row, owner_id), headers={"Location": f"/v1/sessions/{row.id}"})

    @get(responses=problem_responses(404, 422))
    async def listing(
        self,
        services: NamedDependency[Services],
        principal: NamedDependency[Principal],
        limit: Annotated[int, QueryParameter(ge=1, le=MAX_PAGE)] = 20,
        after: Annotated[str | None, QueryParameter(description="Id of the last one seen.")] = None,
        shared: Annotated[bool, QueryParameter(description="Those of others that are shared with you.")] = False,
    ) -> SessionList:
        """Sessions, newest first; not those of a link, which anybody may have."""
        if principal.is_link:
            raise Forbidden("A link lists no sessions: keep the ids of yours.", code="not_for_links")
        page = await services.conversations.sessions.page(principal.user_id, limit=limit, after=after, shared=shared)
        return SessionList([session_body(row, principal.user_id) for row in page.sessions], page.has_more)

    @get("/{session_id:str}", responses=problem_responses(404))
    async def detail(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        session_id: FromPath[str],
    ) -> SessionDetail:
        """A session with its turns and what they used."""
        row, turns = await services.conversations.sessions.get(owner_id, session_id)
        return session_detail(row, turns, owner_id)

    @delete("/{session_id:str}", status_code=204, opt=FOR_ASKING, responses=problem_responses(404, 507))
    async def remove(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        session_id: FromPath[str],
    ) -> None:
        """Remove a session and its turns' KV, except what a fork still uses; a running answer ends."""
        await services.conversations.sessions.delete(owner_id, session_id)

    @post(
        "/{session_id:str}/fork",
        status_code=201,
        opt=FOR_ASKING,
        response_headers=LOCATION,
        responses=problem_responses(404, 409, 422, 507),
    )
    async def fork(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        session_id: FromPath[str],
        data: JSONBody[ForkRequest | None] = None,
    ) -> Response[SessionDetail]:
        """A new session with the same turns up to `after_turn`; nothing is computed or copied."""
        wanted = data or ForkRequest()
        row, turns = await services.conversations.sessions.fork(
            owner_id,
            session_id,
            after_turn=wanted.after_turn,
            title=wanted.title,
            instructions=wanted.instructions,
        )
        return Response(session_detail(row, turns, owner_id), headers={"Location": f"/v1/sessions/{row.id}"})
