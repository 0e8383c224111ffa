"""Good files of every format, from which damaged ones are made: those of the extraction corpus."""

import io
import os
import warnings
import zipfile
from functools import cache

from benchmarks.extraction_parts.corpus import FORMATS

NAMES = {"PDF": "pdf", "DOCX": "docx", "EPUB": "epub", "HTML": "html", "Markdown": "md", "text": "txt"}
"""Formats as they are counted, and what their files are called."""


@cache
def seeds(format_name: str) -> tuple[bytes, ...]:
    """The same bytes in every run: nothing in them tells when they were made."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", "1700000000")
    # One that is encrypted has other random bytes each time.
    made = [make().data for name, make in FORMATS[format_name].items() if not name.startswith("encrypted")]
    return tuple(timeless(data) if data.startswith(b"PK") else data for data in made)


def timeless(package: bytes) -> bytes:
    """The package with the oldest time there is for every part."""
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        return packed([(name, archive.read(name)) for name in archive.namelist()])


def packed(parts: list[tuple[str, bytes]]) -> bytes:
    """A package of the parts in their order; a name may come twice."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names that come twice
        for name, part in parts:
            # Readers of EPUB want this one first and as it is.
            kind = zipfile.ZIP_STORED if name == "mimetype" else zipfile.ZIP_DEFLATED
            archive.writestr(zipfile.ZipInfo(name), part, kind)
    return buffer.getvalue()
