"""`/v1/documents/{id}/shares` and `/v1/sessions/{id}/shares`."""

from litestar import Controller, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from service.api.described import LOCATION
from service.api.problems import problem_responses
from service.api.schemas.shares import ShareBody, ShareList, ShareRequest, share_body
from service.core.services import Services
from service.core.sharing import Target


class DocumentShareController(Controller):
    """With whom a document is shared."""

    path = "/v1/documents/{document_id:str}/shares"
    tags = ("sharing",)

    @post(status_code=201, response_headers=LOCATION, responses=problem_responses(404, 409, 422, 507))
    async def create(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
        data: JSONBody[ShareRequest],
    ) -> Response[ShareBody]:
        """Share a document with a user, the organization, or by a link."""
        return await _create(services, owner_id, Target(document_id=document_id), data)

    @get(responses=problem_responses(404))
    async def listing(
        self, services: NamedDependency[Services], owner_id: NamedDependency[str], document_id: FromPath[str]
    ) -> ShareList:
        """With whom it is shared."""
        return await _listing(services, owner_id, Target(document_id=document_id))

    @delete("/{share_id:str}", status_code=204, responses=problem_responses(404, 507))
    async def revoke(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
        share_id: FromPath[str],
    ) -> None:
        """Share it no longer, from the next request and the next event of a stream on."""
        await services.sharing.revoke(owner_id, Target(document_id=document_id), share_id)


class SessionShareController(Controller):
    """With whom a session, and its documents, are shared."""

    path = "/v1/sessions/{session_id:str}/shares"
    tags = ("sharing",)

    @post(status_code=201, response_headers=LOCATION, responses=problem_responses(404, 409, 422, 507))
    async def create(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        session_id: FromPath[str],
        data: JSONBody[ShareRequest],
    ) -> Response[ShareBody]:
        """Share a session and its documents; with `ask` it can be forked."""
        return await _create(services, owner_id, Target(session_id=session_id), data)

    @get(responses=problem_responses(404, 409))
    async def listing(
        self, services: NamedDependency[Services], owner_id: NamedDependency[str], session_id: FromPath[str]
    ) -> ShareList:
        """With whom it is shared."""
        return await _listing(services, owner_id, Target(session_id=session_id))

    @delete("/{share_id:str}", status_code=204, responses=problem_responses(404, 409, 507))
    async def revoke(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        session_id: FromPath[str],
        share_id: FromPath[str],
    ) -> None:
        """Share it no longer; forks of it are seen only by those with whom its documents are shared otherwise."""
        await services.sharing.revoke(owner_id, Target(session_id=session_id), share_id)


async def _create(services: Services, owner_id: str, target: Target, data: ShareRequest) -> Response[ShareBody]:
    body = share_body(await services.sharing.share(owner_id, target, data.to_share()))
    what = "documents" if target.document_id else "sessions"
    # A link's token is in it.
    headers = {"Location": f"/v1/{what}/{target.id}/shares/{body.id}", "Cache-Control": "no-store"}
    return Response(body, headers=headers)


async def _listing(services: Services, owner_id: str, target: Target) -> ShareList:
    return ShareList([share_body(shared) for shared in await services.sharing.all(owner_id, target)])
