"""The page of a conversation: the answers at one side, the pages they rest on at the other."""

from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

from litestar import Controller, Request, Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter
from litestar.response import Stream

from ingest.model import MediaType
from service.api.principal import FOR_ASKING
from service.api.ranges import disposition, file_response
from service.core.access import READ
from service.core.keys import ASK, Principal
from service.core.services import Services
from service.db.models import SessionRow
from service.errors import Forbidden, Invalid, Unsupported
from service.web.pages import with_error_pages
from service.web.rendering import render

EARLIER = 100


class AskController(Controller):
    """Conversations over documents."""

    path = "/app"
    include_in_schema = False
    exception_handlers = with_error_pages

    @get("/documents/{document_id:str}")
    async def about_document(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        principal: NamedDependency[Principal],
        document_id: FromPath[str],
    ) -> Response[str]:
        """A new conversation about one document; those before are listed."""
        return await _page(request, services, principal, [document_id])

    @get("/ask")
    async def about_documents(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        principal: NamedDependency[Principal],
        document: Annotated[list[str] | None, QueryParameter()] = None,
    ) -> Response[str]:
        """A new conversation about several documents."""
        if not document:
            raise Invalid("Choose the documents to ask about.", param="document")
        return await _page(request, services, principal, document)

    @get("/sessions/{session_id:str}")
    async def session(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        principal: NamedDependency[Principal],
        session_id: FromPath[str],
    ) -> Response[str]:
        """A conversation that began before; the ES module gets its turns from the API."""
        row, _ = await services.conversations.sessions.get(principal.user_id, session_id)
        return await _page(request, services, principal, row.document_ids, row)

    @post("/sessions/{session_id:str}/stop", status_code=204, opt=FOR_ASKING)
    async def stop(
        self, services: NamedDependency[Services], owner_id: NamedDependency[str], session_id: FromPath[str]
    ) -> None:
        """End the answer that runs. Its text so far stays, and its stream tells the end."""
        row, _ = await services.conversations.sessions.get(owner_id, session_id)
        if row.owner_id != owner_id:
            raise Forbidden("The session is shared with you: only its owner can do this.", code="not_owner")
        await services.conversations.answers.stop(session_id)

    @get("/documents/{document_id:str}/file")
    async def pdf(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
    ) -> Stream:
        """A PDF for the browser's viewer, inside our page. Other kinds of files are never shown: they could run."""
        row, path = await services.documents.original(owner_id, document_id)
        if row.media_type != MediaType.PDF:
            raise Unsupported("Only PDFs are shown in the browser's viewer.")
        response = file_response(
            path,
            etag=f'"{row.sha256}"',
            media_type=row.media_type,
            filename=row.filename,
            range_header=request.headers.get("range"),
            if_range=request.headers.get("if-range"),
        )
        response.headers |= {
            "Content-Disposition": disposition(row.filename).replace("attachment", "inline", 1),
            # The viewer is the browser's own page: under a sandbox, or a policy without styles, it shows nothing.
            "Content-Security-Policy": "frame-ancestors 'self'",
            "X-Frame-Options": "SAMEORIGIN",
        }
        return response


async def _page(
    request: Request[Any, Any, Any],
    services: Services,
    principal: Principal,
    document_ids: Sequence[str],
    session: SessionRow | None = None,
) -> Response[str]:
    documents = [await services.documents.get(principal.user_id, each) for each in document_ids]
    readable_only = [view for view in documents if view.access == READ]
    return render(
        request,
        "ask.html",
        documents=documents,
        session=session,
        earlier=await _earlier(services, principal, document_ids),
        begin=_begin(document_ids),
        own=session is None or session.owner_id == principal.user_id,
        may_ask=ASK in principal.scopes and not readable_only,
        name=await services.web_sessions.name_of(principal),
    )


def _begin(document_ids: Sequence[str]) -> str:
    """Where another conversation about the same documents begins."""
    if len(document_ids) == 1:
        return f"/app/documents/{document_ids[0]}"
    return f"/app/ask?{urlencode([('document', each) for each in document_ids])}"


async def _earlier(services: Services, principal: Principal, document_ids: Sequence[str]) -> list[SessionRow]:
    """Their conversations about the same documents; none of a link, which others may have too."""
    if principal.is_link:
        return []
    page = await services.conversations.sessions.page(principal.user_id, limit=EARLIER)
    return [row for row in page.sessions if set(row.document_ids) == set(document_ids)]
