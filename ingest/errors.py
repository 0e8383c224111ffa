"""Errors of reading a document. Each says what is wrong with the file and what its owner can do.

    IngestError
    ├── EmptyDocument           empty_document      no bytes, no pages, or nothing on them
    ├── UnsupportedType         unsupported_type    none of the formats that are read
    ├── Unreadable
    │   ├── Encrypted           encrypted           a password is needed
    │   │   └── WrongPassword   wrong_password      the given one does not open it
    │   ├── Protected           protected           a password or a shop's protection, and no way to open it here
    │   ├── HasMacros           has_macros          a Word document with a program in it
    │   ├── UnsafeFile          unsafe_file         made to harm its reader: a bomb, or names that lead elsewhere
    │   ├── DamagedFile         damaged_file        its structure cannot be recovered
    │   ├── NoTextLayer         no_text_layer       scanned pages
    │   └── PoorText            poor_text           its characters cannot be read
    ├── LimitReached
    │   ├── TooManyPages        too_many_pages
    │   ├── TextTooLong         text_too_long
    │   ├── ContentTooLarge     content_too_large   too much to unpack, or too much markup
    │   ├── ParserTimeout       parser_timeout
    │   └── ParserMemory        parser_memory
    ├── ParserCrashed           parser_crashed      the parser process died for no reason of ours
    └── ParseCancelled          parse_cancelled

`code` is stable and `params` holds the numbers of the message, so that an error can cross a process boundary
(`rebuild`) and a client can read it without parsing English. No message holds text of the document.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ingest.words import some_pages

CONVERT_HELP = "Convert it to PDF, DOCX, HTML, EPUB, Markdown or plain text and upload that."
_OCR_HELP = {
    "off": "Text recognition is off here. Run it over the PDF first (for example `ocrmypdf`) and upload the result.",
    "absent": (
        "Run text recognition over the PDF first (for example `ocrmypdf`) and upload the result; or have Tesseract "
        "installed where Preread runs (on Debian `apt-get install tesseract-ocr`), which then reads such pages."
    ),
    "no_language": (
        "Tesseract is installed without the languages asked for: install them (on Debian for example "
        "`apt-get install tesseract-ocr-eng`) or change PREREAD_OCR_LANGUAGES, and upload the PDF again."
    ),
    "tried": "Text recognition found no words on them. Scan them again, at 300 dots per inch and upright.",
}


@dataclass(eq=False)
class IngestError(Exception):
    """Base of all errors this package raises on purpose; `str()` gives the sentence for the user."""

    code: ClassVar[str] = "ingest_error"

    @property
    def params(self) -> dict[str, Any]:
        """The constructor's arguments: plain numbers and short strings."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        return "The document could not be read."


@dataclass(eq=False)
class EmptyDocument(IngestError):
    """There is nothing to ask about; `what` names what is missing ("bytes", "pages", "text")."""

    code: ClassVar[str] = "empty_document"
    what: str = "text"

    def __str__(self) -> str:
        return f"The document is empty: it has no {self.what}. Upload a file with text in it."


@dataclass(eq=False)
class UnsupportedType(IngestError):
    """`looks_like` names the format the content shows, whatever the file is called."""

    code: ClassVar[str] = "unsupported_type"
    looks_like: str

    def __str__(self) -> str:
        return f"The file looks like {self.looks_like}, which this version does not support yet. {CONVERT_HELP}"


class Unreadable(IngestError):
    """The type is right, but no usable text comes out of the file."""


@dataclass(eq=False)
class Encrypted(Unreadable):
    """The file does not open without a password, and none was given."""

    code: ClassVar[str] = "encrypted"

    def __str__(self) -> str:
        return "The PDF is encrypted. Upload it again with its password in the `password` field."


@dataclass(eq=False)
class WrongPassword(Encrypted):
    """The file does not open with the password given."""

    code: ClassVar[str] = "wrong_password"

    def __str__(self) -> str:
        return "The PDF is encrypted and the password given does not open it. Check the `password` field."


@dataclass(eq=False)
class Protected(Unreadable):
    """`kind` names the format."""

    code: ClassVar[str] = "protected"
    kind: str

    def __str__(self) -> str:
        return (
            f"This {self.kind} is protected and cannot be opened here. Open it in the program that it was made for, "
            "save it without a password or other protection, and upload that."
        )


@dataclass(eq=False)
class HasMacros(Unreadable):
    code: ClassVar[str] = "has_macros"

    def __str__(self) -> str:
        return "The Word document contains macros. Save it as a document without macros (DOCX), and upload that."


@dataclass(eq=False)
class UnsafeFile(Unreadable):
    """`reason` is a phrase of ours, never of the file."""

    code: ClassVar[str] = "unsafe_file"
    reason: str

    def __str__(self) -> str:
        return (
            f"The file was not opened, because {self.reason}. If it comes from someone you trust, save it again "
            "with the program that it was made with, or convert it to PDF, and upload that."
        )


@dataclass(eq=False)
class DamagedFile(Unreadable):
    """`reason` is a phrase of ours, never of the file."""

    code: ClassVar[str] = "damaged_file"
    reason: str

    def __str__(self) -> str:
        return (
            f"The file is damaged: {self.reason}. Open it in a viewer, save or print it to a new PDF, and upload that."
        )


@dataclass(eq=False)
class NoTextLayer(Unreadable):
    """`n_without` of `n_pages` pages show something but have no text. `recognition` says why that of this machine did
    not help: ``off``, ``absent``, ``no_language``, ``tried``."""

    code: ClassVar[str] = "no_text_layer"
    n_without: int
    n_pages: int
    recognition: str = "off"

    def __str__(self) -> str:
        return (
            f"{some_pages(self.n_without, self.n_pages, 'has', 'have')} no text layer; probably scanned images. "
            f"{_OCR_HELP.get(self.recognition, _OCR_HELP['off'])}"
        )


@dataclass(eq=False)
class PoorText(Unreadable):
    """Too many pages whose characters cannot be mapped to text; `share_percent` counts characters."""

    code: ClassVar[str] = "poor_text"
    n_poor: int
    n_pages: int
    share_percent: float

    def __str__(self) -> str:
        return (
            f"{some_pages(self.n_poor, self.n_pages, 'has', 'have')} unreadable text: {self.share_percent:g} % "
            "of it is replacement characters or glyphs without a meaning (usually fonts without a character "
            "map). Print the document to a new PDF or run text recognition over it (`ocrmypdf --force-ocr`)."
        )


class LimitReached(IngestError):
    """Nothing is wrong with the file but its size, or what it costs to read."""


@dataclass(eq=False)
class TooManyPages(LimitReached):
    code: ClassVar[str] = "too_many_pages"
    n_pages: int
    limit: int

    def __str__(self) -> str:
        return f"The document has {self.n_pages:,} pages; the limit is {self.limit:,}. Split it and upload the parts."


@dataclass(eq=False)
class TextTooLong(LimitReached):
    code: ClassVar[str] = "text_too_long"
    limit_nbytes: int

    def __str__(self) -> str:
        return (
            f"The document's text is longer than the limit of {self.limit_nbytes:,} bytes. "
            "Split it and upload the parts."
        )


@dataclass(eq=False)
class ContentTooLarge(LimitReached):
    """`what` is too large ("one page of HTML")."""

    code: ClassVar[str] = "content_too_large"
    what: str
    nbytes: int
    limit_nbytes: int

    def __str__(self) -> str:
        return (
            f"The document has {self.nbytes:,} bytes of {self.what}; the limit is {self.limit_nbytes:,}. "
            "Split it and upload the parts, or convert it to PDF."
        )


@dataclass(eq=False)
class ParserTimeout(LimitReached):
    """`where` says what was being done ("page 7"), `limit` which limit it was ("60 s of wall time")."""

    code: ClassVar[str] = "parser_timeout"
    where: str
    limit: str

    def __str__(self) -> str:
        return (
            f"Reading {self.where} took longer than {self.limit} and was stopped. "
            "Print the document to a new PDF, or split it, and upload that."
        )


@dataclass(eq=False)
class ParserMemory(LimitReached):
    code: ClassVar[str] = "parser_memory"
    limit_nbytes: int

    def __str__(self) -> str:
        return (
            f"Reading the document needed more than {self.limit_nbytes // 2**20:,} MiB of memory and was "
            "stopped. Print the document to a new PDF, or split it, and upload that."
        )


@dataclass(eq=False)
class ParserCrashed(IngestError):
    """`how` is an exit status or signal name."""

    code: ClassVar[str] = "parser_crashed"
    how: str

    def __str__(self) -> str:
        return f"The process that reads documents ended unexpectedly ({self.how}). Try again; if it repeats, report it."


@dataclass(eq=False)
class ParseCancelled(IngestError):
    code: ClassVar[str] = "parse_cancelled"

    def __str__(self) -> str:
        return "Reading the document was cancelled."


def _leaves(base: type[IngestError]) -> dict[str, type[IngestError]]:
    found = {base.code: base}
    for child in base.__subclasses__():
        found |= {code: error for code, error in _leaves(child).items() if code != base.code}
    return found


ERRORS: dict[str, type[IngestError]] = _leaves(IngestError)


def rebuild(code: str, params: dict[str, Any]) -> IngestError:
    """The error another process raised, from its `code` and `params`."""
    return ERRORS[code](**params)
