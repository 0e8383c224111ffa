"""`POST /v1/documents`: the body of the request becomes a file while it arrives."""

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from litestar import Request
from litestar.exceptions import InternalServerException
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema
from litestar.openapi.spec.enums import OpenAPIFormat, OpenAPIType

from service.api.multipart import OVERHEAD_NBYTES, Form, boundary_of, read_form
from service.api.schemas.limits import PRINTABLE
from service.core.services import Services
from service.core.uploads import MAX_TITLE_CHARS, MAX_TTL_S, UploadSettings
from service.db.models import DocumentRow
from service.errors import Invalid, Malformed, Unsupported

_FIELDS = frozenset({"title", "password", "retention", "ttl_s", "visibility"})
_INTEGER = re.compile(r"[+-]?\d{1,18}")


async def receive_document(
    request: Request[Any, Any, Any],
    services: Services,
    owner_id: str,
    repeat_key: str | None = None,
    *,
    fields: frozenset[str] = _FIELDS,
    settings: Callable[[Form], UploadSettings] | None = None,
) -> tuple[DocumentRow, bool]:
    """The document and whether it is new. Whatever goes wrong, nothing of the body is left behind. The form has these
    `fields`, of which `settings` makes the upload's.

    A body that says it is too large is refused before a byte of it is read.
    """
    boundary = boundary_of(content_type_of(request))
    announced = request.content_length
    if announced is not None:
        announced = max(0, announced - OVERHEAD_NBYTES)
    document_id, file = services.uploads.begin(announced)
    kept = False
    try:
        form = await read_form(body_of(request), boundary, names=fields, write=file.write)
        row, created = await services.uploads.complete(
            owner_id, document_id, file, (settings or _settings)(form), repeat_key=repeat_key
        )
        kept = created
        return row, created
    finally:
        if not kept:
            file.discard()


def content_type_of(request: Request[Any, Any, Any]) -> str:
    """Raises Unsupported when the request has none."""
    value = request.headers.get("content-type")
    if not value:
        raise Unsupported("The request has no content type: send the document as multipart/form-data.")
    return value


async def body_of(request: Request[Any, Any, Any]) -> AsyncIterator[bytes]:
    """The body as it comes. Raises Malformed when the client leaves."""
    try:
        async for chunk in request.stream():
            yield chunk
    except InternalServerException:
        raise Malformed("The client left before the whole body had arrived.") from None


def _settings(form: Form) -> UploadSettings:
    if form.filename is None:
        raise Invalid("There is no part named `file`: it is the document.", param="file")
    return UploadSettings(
        filename=form.filename,
        title=form.fields.get("title", ""),
        password=form.fields.get("password") or None,
        retention=form.fields.get("retention", ""),
        ttl_s=_integer("ttl_s", form.fields.get("ttl_s", "")),
        visibility=form.fields.get("visibility", "").strip() or "private",
    )


def _integer(name: str, text: str) -> int | None:
    text = text.strip()
    if text and not _INTEGER.fullmatch(text):
        raise Invalid("It must be a whole number.", param=name)
    return int(text) if text else None


@dataclass
class UploadOperation(Operation):
    """Describes the form in the schema, which the handler reads by itself."""

    def __post_init__(self) -> None:
        form = Schema(
            type=OpenAPIType.OBJECT,
            required=["file"],
            properties={
                "file": Schema(
                    type=OpenAPIType.STRING,
                    format=OpenAPIFormat.BINARY,
                    description="Its kind is found from its content.",
                ),
                "title": Schema(
                    type=OpenAPIType.STRING,
                    max_length=MAX_TITLE_CHARS,
                    pattern=PRINTABLE,
                    description="Shown in lists; else the file's name.",
                ),
                "password": Schema(type=OpenAPIType.STRING, description="Opens an encrypted PDF; never stored."),
                "retention": Schema(
                    type=OpenAPIType.STRING,
                    description="`full`, `balanced`, `small`, or JSON with `sink_tokens`, `summary_tokens` and "
                    "`window_tokens`. Chosen by the document's length if left out.",
                    pattern=r"^(automatic|full|balanced|small|\{.*\})?$",
                ),
                # A field of a form that is left empty is one that is left out.
                "ttl_s": Schema(
                    any_of=[
                        Schema(type=OpenAPIType.INTEGER, minimum=1, maximum=MAX_TTL_S),
                        Schema(type=OpenAPIType.STRING, enum=[""]),
                    ],
                    description="Seconds after which the document is removed; never if left out.",
                ),
                "visibility": Schema(
                    type=OpenAPIType.STRING,
                    enum=["private", ""],
                    description="`private`, the only one; sharing is apart.",
                ),
            },
            additional_properties=False,
        )
        assert self.responses is not None
        self.responses["200"].headers = self.responses["202"].headers  # type: ignore[union-attr]
        self.request_body = RequestBody({"multipart/form-data": OpenAPIMediaType(schema=form)}, required=True)
