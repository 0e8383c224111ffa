"""The first page: documents, what others share, earlier conversations; and parts of it, fetched again by htmx."""

from typing import Annotated, Any

from litestar import Controller, Request, Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter

from service.core.documents import DocumentChanges, DocumentView
from service.core.keys import Principal
from service.core.services import Services
from service.errors import NotFound
from service.web.pages import with_error_pages
from service.web.rendering import base, form_of, render
from service.web.signing_in import see

PAGE = 20
CHANGED = {"HX-Trigger": "documents-changed"}
"""Makes the list fetch itself again."""
NO_CONVERSATIONS = {"own_sessions": (), "more_own": False, "shared_sessions": (), "more_shared": False}


class LibraryController(Controller):
    """Lists of what somebody has, or is shared with them."""

    path = "/"
    include_in_schema = False
    exception_handlers = with_error_pages

    @get("/")
    async def library(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        principal: NamedDependency[Principal],
    ) -> Response[str] | Response[bytes]:
        """All lists; who comes by a link goes to the one thing that it opens."""
        if principal.is_link:
            return see(base(request) + await _behind_link(services, principal))
        own, more = await services.documents.page(principal.user_id, limit=PAGE, after=None)
        others, more_others = await services.documents.page(principal.user_id, limit=PAGE, after=None, shared=True)
        return render(
            request,
            "library.html",
            documents=own,
            more_documents=more,
            others=others,
            more_others=more_others,
            name=await services.web_sessions.name_of(principal),
            max_nbytes=services.settings.max_upload_bytes,
            **await _conversations(services, principal),
        )

    @get("/app/conversations")
    async def conversations(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        principal: NamedDependency[Principal],
    ) -> Response[str]:
        """Conversations, when documents changed: they end with theirs. None of a link."""
        if principal.is_link:
            return render(request, "conversations.html", **NO_CONVERSATIONS)
        return render(request, "conversations.html", **await _conversations(services, principal))

    @get("/app/conversations/more")
    async def more_conversations(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        principal: NamedDependency[Principal],
        after: Annotated[str, QueryParameter()],
        shared: Annotated[bool, QueryParameter()] = False,
    ) -> Response[str]:
        """Rows of one of their two lists, after the last one seen. None of a link."""
        if principal.is_link:
            raise NotFound("A link has no list of conversations.")
        page = await services.conversations.sessions.page(principal.user_id, limit=PAGE, after=after, shared=shared)
        return render(request, "session_rows.html", sessions=page.sessions, has_more=page.has_more, shared=shared)

    @get("/app/documents")
    async def documents(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        principal: NamedDependency[Principal],
        after: Annotated[str | None, QueryParameter()] = None,
        shared: Annotated[bool, QueryParameter()] = False,
    ) -> Response[str]:
        """Rows of their own list, or of what is shared with them, after the last one seen."""
        rows, more = await services.documents.page(principal.user_id, limit=PAGE, after=after, shared=shared)
        return render(request, "rows.html", documents=rows, has_more=more, shared=shared, is_first=after is None)

    @get("/app/documents/{document_id:str}/row")
    async def row(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
    ) -> Response[str]:
        """One row, when its document changed."""
        return _row(request, await services.documents.get(owner_id, document_id))

    @post("/app/documents/{document_id:str}/pin", status_code=200)
    async def pin(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
    ) -> Response[str]:
        """Pin it, or no longer; its row."""
        pinned = (await form_of(request)).get("pinned") == "true"
        view = await services.documents.change(owner_id, document_id, DocumentChanges(pinned=pinned))
        return _row(request, view)


async def _conversations(services: Services, principal: Principal) -> dict[str, Any]:
    """Their own, and those of others that are shared with them."""
    page = services.conversations.sessions.page
    own = await page(principal.user_id, limit=PAGE)
    others = await page(principal.user_id, limit=PAGE, shared=True)
    return {
        "own_sessions": own.sessions,
        "more_own": own.has_more,
        "shared_sessions": others.sessions,
        "more_shared": others.has_more,
    }


async def _behind_link(services: Services, principal: Principal) -> str:
    sessions = await services.conversations.sessions.page(principal.user_id, limit=1, shared=True)
    if sessions.sessions:
        return f"/app/sessions/{sessions.sessions[0].id}"
    documents, _ = await services.documents.page(principal.user_id, limit=1, after=None, shared=True)
    return f"/app/documents/{documents[0].row.id}" if documents else "/app/sign-in"


def _row(request: Request[Any, Any, Any], view: DocumentView) -> Response[str]:
    return render(request, "row.html", document=view)
