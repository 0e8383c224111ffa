"""Dialogs: renaming and keeping, sharing, deleting. Each is a form that htmx puts into the page's one `<dialog>`."""

from typing import Any

from litestar import Controller, Request, Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from service.api.principal import FOR_ASKING
from service.core.documents import DocumentChanges
from service.core.services import Services
from service.core.sharing import NewShare, Target
from service.web.library import CHANGED
from service.web.pages import with_error_pages
from service.web.rendering import base, form_of, render

_KEEP_S = {"1d": 86_400, "7d": 7 * 86_400, "30d": 30 * 86_400, "forever": None}


class DocumentDialogController(Controller):
    """What an owner does with a document."""

    path = "/app/documents/{document_id:str}"
    include_in_schema = False
    exception_handlers = with_error_pages

    @get("/edit")
    async def edit(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
    ) -> Response[str]:
        """Title, and how long it is kept."""
        return render(request, "edit.html", document=await services.documents.get(owner_id, document_id))

    @post("/edit", status_code=200)
    async def change(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
    ) -> Response[str]:
        """Closes the dialog, by leaving nothing in it."""
        form = await form_of(request)
        keep = form.get("keep", "")
        changes = DocumentChanges(title=form.get("title", ""), set_ttl=keep in _KEEP_S, ttl_s=_KEEP_S.get(keep))
        await services.documents.change(owner_id, document_id, changes)
        return Response("", media_type="text/html", headers=CHANGED)

    @get("/delete")
    async def confirm(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
    ) -> Response[str]:
        """What would be gone."""
        return render(request, "delete.html", document=await services.documents.get(owner_id, document_id))

    @post("/delete", status_code=200)
    async def delete(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
    ) -> Response[str]:
        """The receipt."""
        view = await services.documents.get(owner_id, document_id)
        removed = await services.documents.delete(owner_id, document_id)
        response = render(request, "receipt.html", document=view, removed=[part for part in removed if part.objects])
        response.headers.update(CHANGED)
        return response


class SessionDialogController(Controller):
    """What its owner does with a conversation."""

    path = "/app/sessions/{session_id:str}"
    include_in_schema = False
    opt = FOR_ASKING
    exception_handlers = with_error_pages

    @get("/delete")
    async def confirm(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        session_id: FromPath[str],
    ) -> Response[str]:
        """What would be gone."""
        row, _ = await services.conversations.sessions.get(owner_id, session_id)
        return render(request, "delete_session.html", session=row)

    @post("/delete", status_code=200)
    async def delete(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        session_id: FromPath[str],
    ) -> Response[str]:
        """Back to the documents: there is nothing to show."""
        await services.conversations.sessions.delete(owner_id, session_id)
        return Response("", media_type="text/html", headers={"HX-Redirect": f"{base(request)}/"})


class ShareDialogController(Controller):
    """With whom a document (`documents`) or a session (`sessions`) is shared."""

    path = "/app"
    include_in_schema = False
    exception_handlers = with_error_pages

    @get(["/documents/{document_id:str}/share", "/sessions/{session_id:str}/share"])
    async def dialog(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
    ) -> Response[str]:
        """Those with whom it is shared, and a form for one more."""
        return await _dialog(request, services, owner_id, _target(request))

    @post(["/documents/{document_id:str}/share", "/sessions/{session_id:str}/share"], status_code=200)
    async def share(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
    ) -> Response[str]:
        """The dialog again; with the address of a link, which is shown this once."""
        form, target = await form_of(request), _target(request)
        kind = form.get("with", "")
        wanted = NewShare(
            kind,
            form.get("access", ""),
            form.get("user", "").strip() if kind == "user" else None,
            _KEEP_S.get(form.get("keep", "")),
        )
        shared = await services.sharing.share(owner_id, target, wanted)
        return await _dialog(request, services, owner_id, target, token=shared.token, changed=shared.row.id)

    @post(
        [
            "/documents/{document_id:str}/share/{share_id:str}/revoke",
            "/sessions/{session_id:str}/share/{share_id:str}/revoke",
        ],
        status_code=200,
    )
    async def revoke(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        share_id: FromPath[str],
    ) -> Response[str]:
        """The dialog again, without it."""
        target = _target(request)
        await services.sharing.revoke(owner_id, target, share_id)
        return await _dialog(request, services, owner_id, target)


def _target(request: Request[Any, Any, Any]) -> Target:
    named = request.path_params
    return Target(document_id=named.get("document_id"), session_id=named.get("session_id"))


async def _dialog(
    request: Request[Any, Any, Any],
    services: Services,
    owner_id: str,
    target: Target,
    *,
    token: str | None = None,
    changed: str | None = None,
) -> Response[str]:
    kind = "documents" if target.document_id else "sessions"
    if target.document_id:
        title = (await services.documents.get(owner_id, target.document_id)).row.title
    else:
        title = (await services.conversations.sessions.get(owner_id, target.id))[0].title
    shares = await services.sharing.all(owner_id, target)
    values = {"title": title, "shares": shares, "path": f"/app/{kind}/{target.id}/share", "changed": changed}
    response = render(request, "share.html", token=token, **values)
    response.headers["Cache-Control"] = "no-store"
    return response
