"""`/v1/documents`."""

from typing import Annotated

from litestar import Controller, Request, Response, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody, QueryParameter
from litestar.response import ServerSentEvent, Stream

from service.api.described import (
    LOCATION,
    NOTHING_FOLLOWS,
    EventsOperation,
    FileOperation,
    IfRange,
    LastEventId,
    Range,
)
from service.api.document_events import document_events, is_over, position_after
from service.api.problems import problem_responses
from service.api.ranges import file_response
from service.api.schemas.documents import (
    DocumentBody,
    DocumentList,
    DocumentPatch,
    PageBody,
    Receipt,
    document_body,
    page_body,
    receipt,
)
from service.api.schemas.repeats import IdempotencyKey
from service.api.sse import event_stream
from service.api.uploads import UploadOperation, receive_document
from service.core import statuses
from service.core.keys import Principal
from service.core.services import Services

MAX_LIMIT = 100


class DocumentController(Controller):
    """What an owner can do with documents."""

    path = "/v1/documents"
    tags = ("documents",)

    @post(
        status_code=202,
        request_max_body_size=None,  # the file has a limit of its own, counted while it arrives
        operation_class=UploadOperation,
        response_headers=LOCATION,
        responses={
            200: ResponseSpec(DocumentBody, generate_examples=False, description="It is there already."),
            **problem_responses(422, 507),
        },
    )
    async def upload(
        self,
        request: Request,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        idempotency_key: IdempotencyKey = None,
    ) -> Response[DocumentBody]:
        """Take in a file and begin to read it."""
        row, created = await receive_document(request, services, owner_id, idempotency_key)
        return Response(
            document_body(services.documents.view(row)),
            status_code=202 if created else 200,
            headers={"Location": f"/v1/documents/{row.id}"},
        )

    @get(responses=problem_responses(404, 422))
    async def listing(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        limit: Annotated[int, QueryParameter(ge=1, le=MAX_LIMIT)] = 20,
        after: Annotated[str | None, QueryParameter(description="Id of the last one seen.")] = None,
        shared: Annotated[bool, QueryParameter(description="Those of others that are shared with you.")] = False,
    ) -> DocumentList:
        """Your documents, or those shared with you, newest first."""
        views, has_more = await services.documents.page(owner_id, limit=limit, after=after, shared=shared)
        return DocumentList([document_body(view) for view in views], has_more)

    @get("/{document_id:str}", responses=problem_responses(404))
    async def detail(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
    ) -> DocumentBody:
        """One document and how far it is."""
        return document_body(await services.documents.get(owner_id, document_id))

    @patch("/{document_id:str}", responses=problem_responses(404, 422, 507))
    async def change(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
        data: JSONBody[DocumentPatch],
    ) -> DocumentBody:
        """Change title, time to live, pin or visibility."""
        return document_body(await services.documents.change(owner_id, document_id, data.changes()))

    @delete("/{document_id:str}", status_code=200, responses=problem_responses(404, 507))
    async def remove(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
    ) -> Receipt:
        """Remove a document from every tier, in whatever state it is."""
        return receipt(await services.documents.delete(owner_id, document_id))

    @post("/{document_id:str}/cancel", status_code=200, responses=problem_responses(404, 409, 507))
    async def cancel(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
    ) -> DocumentBody:
        """Stop reading a document."""
        return document_body(await services.documents.cancel(owner_id, document_id))

    @get("/{document_id:str}/pages/{number:int}", responses=problem_responses(404, 409))
    async def text_page(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
        number: FromPath[int],
    ) -> PageBody:
        """A page's text as the model got it, with its range of the document's tokens."""
        return page_body(await services.documents.text_page(owner_id, document_id, number))

    @get(
        "/{document_id:str}/file",
        operation_class=FileOperation,
        responses={
            206: ResponseSpec(bytes, generate_examples=False, description="The bytes that were asked for."),
            **problem_responses(404, 416),
        },
    )
    async def original(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        document_id: FromPath[str],
        range_header: Range = None,
        if_range: IfRange = None,
    ) -> Stream:
        """The bytes that were uploaded; `Range` is honoured."""
        row, path = await services.documents.original(owner_id, document_id)
        return file_response(
            path,
            etag=f'"{row.sha256}"',
            media_type=row.media_type,
            filename=row.filename,
            range_header=range_header,
            if_range=if_range,
        )

    @get(
        "/{document_id:str}/events",
        media_type="text/event-stream",
        operation_class=EventsOperation,
        responses=NOTHING_FOLLOWS | problem_responses(404),
    )
    async def events(
        self,
        services: NamedDependency[Services],
        principal: NamedDependency[Principal],
        document_id: FromPath[str],
        last_event_id: LastEventId = None,
    ) -> ServerSentEvent | Response[None]:
        """`progress` events, then `ready` or `failed`; from `Last-Event-ID` on, 204 when nothing follows."""
        view = await services.documents.get(principal.user_id, document_id)
        position = position_after(last_event_id)
        if is_over(position) and view.status in statuses.TERMINAL:
            return Response(None, status_code=204)
        permit = await services.permits.of_document(principal, document_id)
        views = services.documents.changes(principal.user_id, document_id)
        return event_stream(
            document_events(views, position),
            heartbeat_s=services.settings.sse_heartbeat_s,
            stopping=services.stopping,
            permit=permit,
        )
