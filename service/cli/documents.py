"""Files into documents, with progress on the terminal."""

from pathlib import Path
from typing import Any

from service.api.principal import OWNER
from service.api.schemas.documents import document_body
from service.cli.progress import document_bar
from service.core.documents import DocumentView
from service.core.services import Services
from service.core.uploads import UploadSettings
from service.db.models import DocumentRow
from service.errors import Invalid, ServiceError

_CHUNK_NBYTES = 1 << 20


async def read_document(
    services: Services, path: Path, *, password: str | None = None, title: str = "", retention: str = ""
) -> tuple[DocumentRow, bool]:
    """A file's document once it is ready, and whether it was new.

    The same bytes are read once. Raises ServiceError with the reason when the document cannot be read,
    OSError.
    """
    row, created = await _take_in(services, path, UploadSettings(path.name, title, password, retention))
    view = await _follow(services, row.id, path.name)
    if view.status != "ready":
        error = view.row
        raise ServiceError(error.error_detail or f"it is {view.status}", code=error.error_code or view.status)
    return view.row, created


async def existing_document(services: Services, document_id: str) -> DocumentRow:
    """A document by its id. Raises NotFound, Invalid when it is not ready."""
    view = await services.documents.get(OWNER, document_id)
    if view.status != "ready":
        raise Invalid(f"The document {document_id} is {view.status}, not ready.")
    return view.row


async def described(services: Services, document_id: str) -> Any:
    """The document as the API shows it."""
    return document_body(await services.documents.get(OWNER, document_id))


async def _take_in(services: Services, path: Path, settings: UploadSettings) -> tuple[DocumentRow, bool]:
    with path.open("rb") as source:
        document_id, file = services.uploads.begin(path.stat().st_size)
        created = False
        try:
            while data := source.read(_CHUNK_NBYTES):
                await file.write(data)
            row, created = await services.uploads.complete(OWNER, document_id, file, settings)
        finally:
            if not created:
                file.discard()
    return row, created


async def _follow(services: Services, document_id: str, name: str) -> DocumentView:
    view = await services.documents.get(OWNER, document_id)
    if view.status == "ready":
        return view
    with document_bar(name) as show:
        async for view in services.documents.changes(OWNER, document_id):
            show(view.progress)
    return view
