"""PDF through pypdf.

Only the parser process calls this: pypdf may loop, exhaust memory or recurse on a hostile file.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from pypdf import PageObject, PasswordType, PdfReader
from pypdf.errors import DependencyError, FileNotDecryptedError

from ingest.errors import DamagedFile, EmptyDocument, Encrypted, TooManyPages, WrongPassword
from ingest.formats.pdf.forms import filled_in
from ingest.formats.pdf.repair import mended
from ingest.limits import ParseLimits

if TYPE_CHECKING:
    from ingest.formats.pdf.pdfium import SecondReader

_PAGES_CACHED = 100
"""Objects pypdf has resolved are let go after this many pages: most are contents no one needs again."""
_MOST_CHARS = 100_000
"""A page with more text is no page in columns, and too much to look at twice."""
_LEAST_LINES = 10
_NO_TITLES = frozenset(("", "untitled", "(anonymous)", "none"))
_SHOWS_TEXT = re.compile(rb"[)>\]]\s*(?:Tj|TJ|'|\")(?=\s|$)")
_PAINTS = re.compile(rb"(?:^|(?<=[\s\]>)]))(?:Do|sh|EI|[fFBb]\*?|[Ss])(?=\s|$)")
_RECURSION = "its objects are nested too deeply"
_UNRECOVERABLE = "its structure cannot be recovered"


@dataclass(frozen=True, slots=True)
class RawPage:
    """What one page gave. `text` is None when it could not be read; `shows_something`: it is not blank; `filled_in`:
    what people put into its forms or typed onto it, which `text` does not have."""

    label: str | None
    text: str | None
    shows_something: bool
    filled_in: str = ""


class PdfFile:
    """An open PDF.

    Raises Encrypted, WrongPassword, DamagedFile, EmptyDocument and TooManyPages when constructed.
    """

    def __init__(self, path: Path, stream: BinaryIO, limits: ParseLimits, password: str | None) -> None:
        self._reader = _open(stream)
        _unlock(self._reader, password)
        self.n_pages = _count_pages(self._reader)
        if self.n_pages == 0:
            raise EmptyDocument("pages")
        if self.n_pages > limits.max_pages:
            raise TooManyPages(self.n_pages, limits.max_pages)
        self.title = _title(self._reader)
        self._path = path
        self._password = password

    def pages(self) -> Iterator[RawPage]:
        """Each page in order, decoded as it is asked for."""
        labels = _labels(self._reader, self.n_pages)
        for index in range(self.n_pages):
            yield self._in_order(index, _read_page(self._reader, index, labels[index]))
            if index % _PAGES_CACHED == _PAGES_CACHED - 1:
                self._reader.resolved_objects.clear()

    def picture(self, number: int) -> bytes | None:
        """Page `number`, from 1, as a picture to recognize text in; None where it cannot be drawn."""
        return self._second.picture(number - 1) if self._second is not None else None

    @cached_property
    def _second(self) -> "SecondReader | None":
        """Opened by the first page that needs it: many files have none."""
        from ingest.formats.pdf.pdfium import second_reader

        return second_reader(self._path, self._password, self.n_pages)

    def _in_order(self, index: int, page: RawPage) -> RawPage:
        """The page with its columns one after the other, and with what was filled in."""
        text = page.text
        if text and text.count("\n") >= _LEAST_LINES and len(text) <= _MOST_CHARS:
            text = (self._second.in_columns(index) if self._second is not None else None) or text
        return replace(page, text=text, filled_in=_filled_in(self._reader, index))


@contextmanager
def open_pdf(path: Path, limits: ParseLimits, password: str | None) -> Iterator[PdfFile]:
    """The PDF at `path`, mended if need be. Raises what `PdfFile` raises."""
    with path.open("rb") as stream:
        try:
            pdf = PdfFile(path, stream, limits, password)
        except DamagedFile:
            stream.seek(0)
            pdf = PdfFile(path, mended(stream.read()), limits, password)
        yield pdf


def _open(stream: BinaryIO) -> PdfReader:
    try:
        return PdfReader(stream, strict=False)
    except MemoryError:
        raise
    except RecursionError:
        raise DamagedFile(_RECURSION) from None
    except Exception:
        # pypdf documents that broken files raise exceptions of any kind.
        raise DamagedFile(_UNRECOVERABLE) from None


def _unlock(reader: PdfReader, password: str | None) -> None:
    """Try no password first: it opens files whose owner password only restricts printing."""
    try:
        if not reader.is_encrypted or reader.decrypt("") != PasswordType.NOT_DECRYPTED:
            return
        if password is None:
            raise Encrypted
        if reader.decrypt(password) == PasswordType.NOT_DECRYPTED:
            raise WrongPassword
    except (Encrypted, MemoryError):
        raise
    except (DependencyError, NotImplementedError):
        raise DamagedFile("it is encrypted by a method this version does not know") from None
    except Exception:
        raise DamagedFile("its encryption settings cannot be read") from None


def _count_pages(reader: PdfReader) -> int:
    try:
        return len(reader.pages)
    except MemoryError:
        raise
    except FileNotDecryptedError:
        raise Encrypted from None
    except RecursionError:
        raise DamagedFile(_RECURSION) from None
    except Exception:
        raise DamagedFile("its list of pages cannot be read") from None


def _title(reader: PdfReader) -> str | None:
    try:
        title = reader.metadata.title if reader.metadata else None
    except MemoryError:
        raise
    except Exception:
        return None
    return title if isinstance(title, str) and title.strip().lower() not in _NO_TITLES else None


def _labels(reader: PdfReader, n_pages: int) -> list[str | None]:
    try:
        labels: list[str | None] = [str(label) for label in reader.page_labels]
    except MemoryError:
        raise
    except Exception:
        return [None] * n_pages
    return labels if len(labels) == n_pages else [None] * n_pages


def _read_page(reader: PdfReader, index: int, label: str | None) -> RawPage:
    try:
        page = reader.pages[index]
        text = page.extract_text()
        return RawPage(label, text, True) if text.strip() else _without_text(page, text, label)
    except MemoryError:
        raise
    except Exception:
        return RawPage(label, None, True)


def _without_text(page: PageObject, text: str, label: str | None) -> RawPage:
    contents = page.get_contents()
    if contents is None:
        # Named, but not in the file: lost, not blank.
        return RawPage(label, None if "/Contents" in page else "", False)
    content = contents.get_data()
    if not text and _SHOWS_TEXT.search(content):
        # It shows text and pypdf got none, for want of its fonts.
        return RawPage(label, None, True)
    return RawPage(label, "", _PAINTS.search(content) is not None)


def _filled_in(reader: PdfReader, index: int) -> str:
    try:
        return filled_in(reader.pages[index])
    except MemoryError:
        raise
    except Exception:
        return ""
