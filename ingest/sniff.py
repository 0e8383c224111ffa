"""What a file is, from its first bytes: never from its name or the content type a client sent.

The server itself asks this of every upload, so each pattern takes time by the length of what it sees, whatever that is:
it gives nothing back that it took, or what it repeats is bounded.
"""

import re

from ingest.encoding import decode, looks_binary
from ingest.errors import EmptyDocument, IngestError, Protected, UnsupportedType
from ingest.model import MediaType

SNIFF_NBYTES = 64 * 1024
"""How much of a file's beginning `sniff` wants to see."""

_PDF_JUNK_NBYTES = 1024
"""ISO 32000-1, implementation note 13: the header is looked for in this many bytes."""

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"{\\rtf", "a rich text (RTF) document"),
    (b"%!PS", "a PostScript document"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"II*\0", "a TIFF image"),
    (b"MM\0*", "a TIFF image"),
    (b"\0\0\0\x0cjP", "a JPEG 2000 image"),
    (b"AT&TFORM", "a DjVu document"),
    (b"\x7fELF", "an executable program"),
    (b"\xfe\xed\xfa", "an executable program"),
    (b"\xcf\xfa\xed\xfe", "an executable program"),
    (b"\xca\xfe\xba\xbe", "an executable program"),
    (b"\0asm", "a WebAssembly program"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ\0", "an xz archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"GGUF", "a GGUF model"),
    (b"ID3", "an MP3 recording"),
    (b"OggS", "an Ogg recording"),
    (b"fLaC", "a FLAC recording"),
    (b"\x1aE\xdf\xa3", "a Matroska video"),
)
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_ENCRYPTED_PACKAGE = "EncryptedPackage".encode("utf-16-le")
_ZIP_PARTS: tuple[tuple[bytes, MediaType], ...] = (
    (b"mimetypeapplication/epub+zip", MediaType.EPUB),
    (b"META-INF/container.xml", MediaType.EPUB),
    (b"word/", MediaType.DOCX),
)
ZIP_CONTENTS: tuple[tuple[bytes, str], ...] = (
    (b"xl/", "an Excel workbook (XLSX)"),
    (b"ppt/", "a PowerPoint presentation (PPTX)"),
    (b"application/vnd.oasis.opendocument", "an OpenDocument file (ODT, ODS or ODP)"),
)
_PDF_HEADER = re.compile(rb"%PDF-\d\.\d")
_PDF_OBJECT = re.compile(rb"(?<!\d)\d{1,10}\s++\d{1,10}\s++obj\b")
_SHOWN = re.compile(r"\S")
_BEFORE_ELEMENTS = (("<?xml", ">"), ("<!--", "-->"))
_HTML = re.compile(r"<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_FIRST_TAG = re.compile(
    r"<(?:article|center|div|dl|font|h[1-6]|header|main|meta|nav|ol|p|section|span|style|table|title|ul)(?=[\s>])",
    re.IGNORECASE,
)
_CLOSED_TAG = re.compile(
    r"</(?:a|b|div|em|font|h[1-6]|i|li|p|span|strong|style|table|td|title|tr|ul|ol)\s*>", re.IGNORECASE
)
_SVG = re.compile(r"(?:<!.*?>\s*)?<svg\b", re.IGNORECASE | re.DOTALL)


def sniff(head: bytes) -> MediaType:
    """The kind of document whose first `SNIFF_NBYTES` bytes (or all, if fewer) are `head`.

    Raises EmptyDocument for no bytes at all, Protected for an Office document with a password, and UnsupportedType for
    whatever else is not read. A packed document may still turn out to be another: `Archive.kind` sees all of it.
    """
    if not head:
        raise EmptyDocument("bytes")
    if _is_pdf(head):
        return MediaType.PDF
    if head.startswith(b"PK\x03\x04"):
        return _zip_kind(head)
    if head.startswith(_OLE):
        raise _ole_error(head)
    if (binary := _binary_kind(head)) is not None:
        raise UnsupportedType(binary)
    return _text_kind(head)


def _is_pdf(head: bytes) -> bool:
    """A header at the start; or after junk on a line of its own, with PDF objects behind it."""
    start = head[:_PDF_JUNK_NBYTES]
    if start.lstrip(b"\xef\xbb\xbf\0\t\n\f\r ").startswith(b"%PDF-"):
        return True
    header = _PDF_HEADER.search(start)
    if header is None:
        return False
    follows_text = header.start() and start[header.start() - 1] not in b"\n\r" and 32 <= start[header.start() - 1] < 127
    return not follows_text and _PDF_OBJECT.search(head, header.end()) is not None


def _zip_kind(head: bytes) -> MediaType:
    for mark, media_type in _ZIP_PARTS:
        if mark in head:
            return media_type
    for mark, name in ZIP_CONTENTS:
        if mark in head:
            raise UnsupportedType(name)
    if b"[Content_Types].xml" in head and len(head) >= SNIFF_NBYTES:
        # An Office document whose first parts are pictures; which one, its list of parts at the end tells.
        return MediaType.DOCX
    raise UnsupportedType("a ZIP archive")


def _ole_error(head: bytes) -> IngestError:
    """An Office document with a password is packed like the old ones."""
    if _ENCRYPTED_PACKAGE in head:
        return Protected("Office document")
    return UnsupportedType("an old Microsoft Office document (DOC, XLS or PPT), or one with a password")


def _binary_kind(head: bytes) -> str | None:
    if head.startswith((b"PK\x05\x06", b"PK\x07\x08")):
        return "a ZIP archive"
    if head.startswith(b"MZ") and b"\0" in head[:256]:
        return "an executable program"
    if head.startswith(b"RIFF") and head[8:12] in (b"WEBP", b"WAVE", b"AVI "):
        return {b"WEBP": "a WebP image", b"WAVE": "a WAV recording"}.get(head[8:12], "an AVI video")
    if head[4:8] == b"ftyp":
        return "an HEIC or AVIF image" if head[8:12] in (b"heic", b"heix", b"mif1", b"avif") else "an MP4 video"
    return next((name for magic, name in _MAGIC if head.startswith(magic)), None)


def _text_kind(head: bytes) -> MediaType:
    whole = len(head) < SNIFF_NBYTES
    # The cut may fall inside a character: three bytes less cannot decide anything.
    decoded = decode(head if whole else head[: head.rfind(b"\n") + 1] or head[:-3])
    if decoded is None or looks_binary(decoded.text):
        raise UnsupportedType("binary data")
    first = _first_element(decoded.text)
    if _HTML.match(decoded.text, first):
        return MediaType.HTML
    if _SVG.match(decoded.text, first):
        raise UnsupportedType("an SVG image")
    if looks_like_markdown(decoded.text):
        return MediaType.MARKDOWN
    return MediaType.HTML if _looks_like_html(decoded.text, first) else MediaType.TEXT


def _first_element(text: str) -> int:
    """Where the first element of a page would stand: behind white space, an XML declaration and comments."""
    end = 0
    while (shown := _SHOWN.search(text, end)) is not None:
        at = shown.start()
        closing = next((closing for opening, closing in _BEFORE_ELEMENTS if text.startswith(opening, at)), None)
        if closing is None or (found := text.find(closing, at)) < 0:
            return at
        end = found + len(closing)
    return len(text)


def _looks_like_html(text: str, first: int) -> bool:
    """A page without its frame: it begins with an element, and has several that are closed."""
    return _FIRST_TAG.match(text, first) is not None and len(_CLOSED_TAG.findall(text)) >= 3


_HEADING = re.compile(r"(?:\A|\n[ \t]*\n)(#{1,6}) +\S[^\n]*+(?=\n[ \t]*(?:\n|[-*|>])|\s*\Z)")
_SETEXT = re.compile(r"(?:\A|\n\n)[^\n#>|-][^\n]{1,80}\n(?:={3,}|-{3,})[ \t]*\n(?=[ \t]*\n)")
_TABLE_RULE = re.compile(
    r"\n[^\n|]*+\|[^\n]*+\n[ \t]*+\|?[ \t]*+:?-{2,}+:?[ \t]*+"
    r"(?:\|[ \t]*+:?-{2,}+:?[ \t]*+)+\|?[ \t]*+(?:\n|\Z)"
)
_FENCE = re.compile(r"^ {0,3}(`{3,}+|~{3,}+)[^`\n]*+\n.*?^ {0,3}\1", re.M | re.S)
_LINK = re.compile(r"\[[^\]\n]{1,300}+\]\([^)\s]{1,2000}+(?: \"[^\"\n]{0,300}+\")?\)")
_STRONG = re.compile(r"(?<!\w)(\*\*|__)(?=\S)[^\n*_]{1,200}?(?<=\S)\1(?!\w)")
_BULLET = re.compile(r"^ {0,3}[-*+] +\S", re.M)


def looks_like_markdown(text: str) -> bool:
    """Two kinds of Markdown structure, or one nothing else has (a table's rule, headings of two levels)."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    levels = set(_HEADING.findall(text))
    score = 2 * bool(_TABLE_RULE.search("\n" + text)) + min(2, len(levels))
    score += bool(_FENCE.search(text)) + bool(_LINK.search(text)) + bool(_STRONG.search(text))
    score += bool(_SETEXT.search(text)) + (len(_BULLET.findall(text)) >= 2)
    return score >= 2
