"""`/v1/files`: documents, as files for a purpose."""

from typing import Annotated, Literal

import msgspec
from litestar import Controller, Request, delete, get, post
from litestar.di import NamedDependency
from litestar.openapi.spec import OpenAPIMediaType, Operation, Reference, RequestBody, Schema
from litestar.openapi.spec.enums import OpenAPIFormat, OpenAPIType
from litestar.params import FromPath, FromQuery, QueryParameter
from litestar.response import Stream

from service.api.multipart import Form
from service.api.openai.errors import on_openai_error, openai_responses
from service.api.openai.ids import document_id, file_id
from service.api.ranges import file_response
from service.api.schemas.repeats import IdempotencyKey
from service.api.uploads import receive_document
from service.core import statuses
from service.core.chats.texts import OURS
from service.core.services import Services
from service.core.uploads import UploadSettings
from service.db.models import DocumentRow
from service.errors import Invalid

MAX_LIMIT = 10_000
PURPOSES = ("user_data", "assistants")
_FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})
_PAGE = 100


class FileBody(msgspec.Struct, frozen=True):
    """`status`: `uploaded` while it is being read, then `processed` or `error`, which `status_details` explains."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"]
    status_details: str | None = None
    expires_at: int | None = None
    object: Literal["file"] = "file"


class FileList(msgspec.Struct, frozen=True):
    data: list[FileBody]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"


class FileDeleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class FileOperation(Operation):
    """Describes the form in the schema, which the handler reads by itself."""

    def __post_init__(self) -> None:
        text = Schema(type=OpenAPIType.STRING)
        properties: dict[str, Reference | Schema] = {
            "file": Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY),
            "purpose": Schema(type=OpenAPIType.STRING, enum=list(PURPOSES)),
            "expires_after[anchor]": text,
            "expires_after[seconds]": Schema(type=OpenAPIType.INTEGER),
        }
        form = Schema(type=OpenAPIType.OBJECT, required=["file", "purpose"], properties=properties)
        self.request_body = RequestBody({"multipart/form-data": OpenAPIMediaType(schema=form)}, required=True)


class FileController(Controller):
    """Files and documents are the same, under two names."""

    path = "/v1/files"
    tags = ("openai",)
    exception_handlers = {Exception: on_openai_error}  # noqa: RUF012 - Litestar reads this class attribute

    @post(
        status_code=200,
        request_max_body_size=None,  # the file has a limit of its own, counted while it arrives
        operation_class=FileOperation,
        responses=openai_responses(409, 413, 507),
    )
    async def create(
        self,
        request: Request,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        idempotency_key: IdempotencyKey = None,
    ) -> FileBody:
        """Take in a file and begin to read it."""
        row, _ = await receive_document(
            request, services, owner_id, idempotency_key, fields=_FIELDS, settings=_settings
        )
        return file_body(row)

    @get(responses=openai_responses())
    async def listing(
        self,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        limit: Annotated[int, QueryParameter(ge=1, le=MAX_LIMIT)] = MAX_LIMIT,
        after: Annotated[str | None, QueryParameter(description="Id of the last one seen.")] = None,
        order: FromQuery[Literal["asc", "desc"]] = "desc",
        purpose: FromQuery[str | None] = None,
    ) -> FileList:
        """Your files, newest first, or with `asc` the oldest."""
        files = [file_body(row) for row in await _rows(services, owner_id)]
        files = [file for file in files if purpose in (None, file.purpose)]
        if order == "asc":
            files.reverse()
        if after is not None:
            names = [file.id for file in files]
            if (last := file_id(document_id(after))) not in names:
                raise Invalid("`after` is not the id of a file of this list.", param="after")
            files = files[names.index(last) + 1 :]
        shown = files[:limit]
        ends = (shown[0].id, shown[-1].id) if shown else (None, None)
        return FileList(shown, len(files) > limit, *ends)

    @get("/{file_id:str}", responses=openai_responses())
    async def detail(
        self, services: NamedDependency[Services], owner_id: NamedDependency[str], file_id: FromPath[str]
    ) -> FileBody:
        """One file, and whether it has been read."""
        return file_body((await services.documents.get(owner_id, document_id(file_id))).row)

    @get("/{file_id:str}/content", responses=openai_responses(416))
    async def content(
        self,
        request: Request,
        services: NamedDependency[Services],
        owner_id: NamedDependency[str],
        file_id: FromPath[str],
    ) -> Stream:
        """The bytes that were sent."""
        row, path = await services.documents.original(owner_id, document_id(file_id))
        return file_response(
            path,
            etag=f'"{row.sha256}"',
            media_type=row.media_type,
            filename=row.filename,
            range_header=request.headers.get("range"),
            if_range=request.headers.get("if-range"),
        )

    @delete("/{file_id:str}", status_code=200, responses=openai_responses(507))
    async def remove(
        self, services: NamedDependency[Services], owner_id: NamedDependency[str], file_id: FromPath[str]
    ) -> FileDeleted:
        """Remove a file from every tier, with all that was asked about it."""
        await services.documents.delete(owner_id, document_id(file_id))
        return FileDeleted(file_id)


def file_body(row: DocumentRow) -> FileBody:
    """A document as a file."""
    status: Literal["uploaded", "processed", "error"] = "uploaded"
    if row.status in statuses.TERMINAL:
        status = "processed" if row.status == statuses.READY else "error"
    return FileBody(
        file_id(row.id),
        row.nbytes,
        int(row.created_at),
        row.filename,
        row.purpose if row.purpose in PURPOSES else PURPOSES[0],
        status,
        row.error_detail,
        None if row.expires_at is None else int(row.expires_at),
    )


def require_purpose(purpose: str | None) -> str:
    """Raises Invalid for one that no document is for."""
    if purpose not in PURPOSES:
        raise Invalid(f"purpose must be one of: {', '.join(PURPOSES)}.", param="purpose")
    return purpose


async def _rows(services: Services, owner_id: str) -> list[DocumentRow]:
    """All of an owner's, but for those that the server made of prompts."""
    rows: list[DocumentRow] = []
    after, has_more = None, True
    while has_more:
        views, has_more = await services.documents.page(owner_id, limit=_PAGE, after=after)
        rows += [view.row for view in views]
        after = views[-1].row.id if views else None
        has_more = has_more and after is not None
    return [row for row in rows if row.purpose not in OURS]


def _settings(form: Form) -> UploadSettings:
    if form.filename is None:
        raise Invalid("There is no part named `file`.", param="file")
    seconds, anchor = form.fields.get("expires_after[seconds]"), form.fields.get("expires_after[anchor]")
    if anchor not in (None, "created_at"):
        raise Invalid("Files expire so long after they were made: the anchor is `created_at`.", param="expires_after")
    if seconds is not None and not (seconds.isascii() and seconds.isdigit() and len(seconds) <= 12):
        raise Invalid("expires_after.seconds must be a whole number.", param="expires_after")
    return UploadSettings(
        filename=form.filename,
        ttl_s=None if seconds is None else int(seconds),
        purpose=require_purpose(form.fields.get("purpose")),
    )
