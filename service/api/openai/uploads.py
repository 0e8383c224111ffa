"""`/v1/uploads`: files that come in parts."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, Literal

import msgspec
from litestar import Controller, Request, post
from litestar.di import NamedDependency
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema
from litestar.openapi.spec.enums import OpenAPIFormat, OpenAPIType
from litestar.params import FromPath, JSONBody

from service.api.multipart import boundary_of, read_form
from service.api.openai.errors import on_openai_error, openai_responses
from service.api.openai.files import FileBody, file_body, require_purpose
from service.api.uploads import body_of, content_type_of
from service.core.chats.parts import Announced
from service.core.services import Services
from service.db.chats import UploadRow
from service.errors import Invalid


class ExpiresAfter(msgspec.Struct, frozen=True):
    seconds: int
    anchor: Literal["created_at"] = "created_at"


class NewUpload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`mime_type` is not believed: the kind is found from the content."""

    bytes: int
    filename: str
    mime_type: str
    purpose: str
    expires_after: ExpiresAfter | None = None


class CompleteUpload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts in their order; `md5` of all of them, in hexadecimal."""

    part_ids: list[str]
    md5: str | None = None


class UploadBody(msgspec.Struct, frozen=True):
    """`status`: `pending`, `completed`, `cancelled`."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str
    file: FileBody | None = None
    object: Literal["upload"] = "upload"


class PartBody(msgspec.Struct, frozen=True):
    id: str
    created_at: int
    upload_id: str
    object: Literal["upload.part"] = "upload.part"


class PartOperation(Operation):
    """Describes the form in the schema, which the handler reads by itself."""

    def __post_init__(self) -> None:
        data = Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY)
        form = Schema(type=OpenAPIType.OBJECT, required=["data"], properties={"data": data})
        self.request_body = RequestBody({"multipart/form-data": OpenAPIMediaType(schema=form)}, required=True)


class UploadController(Controller):
    """An upload lives for an hour."""

    path = "/v1/uploads"
    tags = ("openai",)
    exception_handlers = {Exception: on_openai_error}  # noqa: RUF012 - Litestar reads this class attribute

    @post(status_code=200, responses=openai_responses(413, 507))
    async def create(
        self, services: NamedDependency[Services], owner_id: NamedDependency[str], data: JSONBody[NewUpload]
    ) -> UploadBody:
        """Begin an upload of a file of this size."""
        seconds = data.expires_after.seconds if data.expires_after else None
        announced = Announced(data.filename, data.bytes, require_purpose(data.purpose), seconds)
        return _body(await services.chats.parts.begin(owner_id, announced))

    @post(
        "/{upload_id:str}/parts",
        status_code=200,
        request_max_body_size=None,  # a part has a limit of its own, counted while it arrives
        operation_class=PartOperation,
        responses=openai_responses(409, 413, 507),
    )
    async def add_part(
        self,
        request: Request,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        upload_id: FromPath[str],
    ) -> PartBody:
        """Send a part: up to 64 MiB."""
        await services.chats.parts.require_pending(owner_id, upload_id)
        async with aclosing(_part(request)) as chunks:
            part_id = await services.chats.parts.add(owner_id, upload_id, chunks)
        return PartBody(part_id, int(services.clock.now()), upload_id)

    @post("/{upload_id:str}/complete", status_code=200, responses=openai_responses(409, 413, 507))
    async def complete(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        upload_id: FromPath[str],
        data: JSONBody[CompleteUpload],
    ) -> UploadBody:
        """Make a file of the parts, and begin to read it."""
        row, document = await services.chats.parts.complete(owner_id, upload_id, data.part_ids, data.md5)
        return _body(row, file_body(document))

    @post("/{upload_id:str}/cancel", status_code=200, responses=openai_responses(409, 507))
    async def cancel(
        self, services: NamedDependency[Services], owner_id: NamedDependency[str], upload_id: FromPath[str]
    ) -> UploadBody:
        """Drop the parts."""
        return _body(await services.chats.parts.cancel(owner_id, upload_id))


async def _part(request: Request[Any, Any, Any]) -> AsyncGenerator[bytes, None]:
    """The bytes of the part `data` as they come; the form is read no faster than they are taken."""
    chunks: asyncio.Queue[bytes | None] = asyncio.Queue(1)
    boundary = boundary_of(content_type_of(request))

    async def read() -> None:
        try:
            form = await read_form(body_of(request), boundary, names=frozenset(), write=chunks.put, file="data")
            if form.filename is None:
                raise Invalid("There is no part named `data`: it is the piece of the file.", param="data")
        except asyncio.CancelledError:
            raise  # nobody takes chunks any more
        except BaseException:
            await chunks.put(None)
            raise
        await chunks.put(None)

    reading = asyncio.create_task(read())
    try:
        while (chunk := await chunks.get()) is not None:
            yield chunk
        await reading
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await reading


def _body(row: UploadRow, file: FileBody | None = None) -> UploadBody:
    return UploadBody(
        row.id,
        row.nbytes,
        int(row.created_at),
        int(row.expires_at),
        row.filename,
        row.purpose,
        row.status,
        file,
    )
