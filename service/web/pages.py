"""Errors as a page, for who looks at one; parts that were fetched get the problem, as from the API."""

from typing import Any

from litestar import Request, Response
from litestar.types import ExceptionHandlersMap

from service.api.problems import Problem, headers_of, on_error, problem_of, request_id_of
from service.web.rendering import render


def _on_error(request: Request[Any, Any, Any], error: Exception) -> Response[str] | Response[Problem]:
    wants_page = request.method == "GET" and "hx-request" not in request.headers
    if not wants_page or "text/html" not in request.headers.get("accept", ""):
        return on_error(request, error)
    problem = problem_of(error, request_id_of(request))
    if problem.status >= 500:
        on_error(request, error)  # has it in the log
    response = render(request, "error.html", status=problem.status, problem=problem, code=problem.error.code)
    response.headers.update(headers_of(error))
    return response


with_error_pages: ExceptionHandlersMap = {Exception: _on_error}
