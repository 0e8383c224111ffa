"""Signing in by key or by link, signing out, and the switches for language and theme."""

from typing import Any
from urllib.parse import quote

from litestar import Controller, Request, Response, get, post
from litestar.datastructures import Cookie
from litestar.di import NamedDependency

from service.api.browsers import COOKIE, HOST_COOKIE, LINK_COOKIE, is_encrypted, require_own_page, session_of
from service.core.credentials import is_link
from service.core.services import Services
from service.core.web_sessions import LASTS_S
from service.errors import Invalid, Unauthenticated
from service.web.catalogue import LANGUAGES
from service.web.pages import with_error_pages
from service.web.rendering import LANGUAGE_COOKIE, THEME_COOKIE, THEMES, form_of, own_path, render

_KEPT = "/?&=%:;,+@!$'()*~#"
_YEAR_S = 365 * 24 * 3600
_PREFERENCES = {"language": (LANGUAGE_COOKIE, LANGUAGES), "theme": (THEME_COOKIE, THEMES)}


class SignInController(Controller):
    """What may be seen without a key."""

    path = "/app"
    include_in_schema = False
    opt = {"public": True}  # noqa: RUF012 - Litestar reads this class attribute
    exception_handlers = with_error_pages

    @get("/sign-in")
    async def form(
        self, request: Request[Any, Any, Any], services: NamedDependency[Services]
    ) -> Response[str] | Response[bytes]:
        """The form; the first page for who is signed in, and where there are no keys."""
        path = own_path(request.query_params.get("next", "/"))
        if not await services.keys.required():
            return see(path)
        return render(request, "sign_in.html", next=path, refused=None)

    @post("/sign-in", status_code=200)
    async def sign_in(
        self, request: Request[Any, Any, Any], services: NamedDependency[Services]
    ) -> Response[str] | Response[bytes]:
        """Sets the cookie, and goes where they wanted to."""
        require_own_page(request.scope)
        form = await form_of(request)
        path = own_path(form.get("next", "/"))
        try:
            token = form.get("key", "").strip()
            if is_link(token):
                raise Unauthenticated("This is a link's token, not a key.", code="link_not_key")
            signed_in = await services.web_sessions.sign_in(token)
        except Unauthenticated as error:
            return render(request, "sign_in.html", status=401, next=path, refused=error.code)
        response = see(path)
        if signed_in.cookie is not None:
            name = HOST_COOKIE if is_encrypted(request.scope) else COOKIE
            response.set_cookie(session_cookie(request, name, signed_in.cookie))
        return response

    @post("/link", status_code=200)
    async def open_link(
        self, request: Request[Any, Any, Any], services: NamedDependency[Services]
    ) -> Response[dict[str, str]]:
        """Where the link leads to; its cookie is for these paths only. Raises Unauthenticated, Invalid."""
        require_own_page(request.scope)
        token = (await form_of(request)).get("token", "").strip()
        if not is_link(token):
            raise Invalid("This is no link's token.", param="token")
        signed_in = await services.web_sessions.sign_in(token)
        path = f"/link/{signed_in.principal.user_id}/" if signed_in.cookie else "/"
        cookie = session_cookie(request, LINK_COOKIE, signed_in.cookie or "", path)
        return Response({"path": path}, cookies=[cookie] if signed_in.cookie else [])

    @get("/link")
    async def link_page(self, request: Request[Any, Any, Any]) -> Response[str]:
        """The token is behind the `#`, which browsers do not send: the ES module posts it."""
        return render(request, "link.html")

    @post("/preferences", status_code=303)
    async def prefer(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        """Language or theme of this browser."""
        require_own_page(request.scope)
        form = await form_of(request)
        response = see(own_path(form.get("next", "/")))
        for field, (cookie, known) in _PREFERENCES.items():
            if form.get(field) in known:
                response.set_cookie(
                    Cookie(
                        cookie, value=form[field], path="/", max_age=_YEAR_S, httponly=True, samesite="strict",
                        secure=is_encrypted(request.scope),
                    )
                )  # fmt: skip
        return response


class SignOutController(Controller):
    """What only who is signed in may do, whatever their key is for."""

    path = "/app"
    include_in_schema = False
    opt = {"public": True}  # noqa: RUF012 - Litestar reads this class attribute
    exception_handlers = with_error_pages

    @get("/session", status_code=204)
    async def session(self) -> None:
        """Whether they are signed in: 401 if not. Browsers leave the cookie out when another site's page led here."""

    @post("/sign-out", status_code=303)
    async def sign_out(self, request: Request[Any, Any, Any], services: NamedDependency[Services]) -> Response[bytes]:
        """The cookie is nothing any more, here and elsewhere."""
        if cookie := session_of(request.scope):
            await services.web_sessions.sign_out(cookie)
        response = see("/app/sign-in")
        for name in (COOKIE, HOST_COOKIE):  # browsers heed the second one only if it is `Secure`
            response.set_cookie(Cookie(name, value="", path="/", max_age=0, secure=name == HOST_COOKIE))
        return response


def see(path: str) -> Response[bytes]:
    """Go there with GET."""
    return Response(b"", status_code=303, headers={"Location": quote(path, safe=_KEPT)}, media_type="text/plain")


def session_cookie(request: Request[Any, Any, Any], name: str, value: str, path: str = "/") -> Cookie:
    """Sent by browsers to this server only, from its own pages only, and out of reach of scripts."""
    return Cookie(
        name, value=value, path=path, max_age=LASTS_S, httponly=True,
        samesite="strict", secure=is_encrypted(request.scope),
    )  # fmt: skip
