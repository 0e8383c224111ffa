"""What reading one document may cost."""

import re
from dataclasses import dataclass

_LANGUAGES = re.compile(r"(?:[\w/]+(?:\+[\w/]+)*)?", re.ASCII)
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ParseLimits:
    """Bounds of one parser process; whichever is reached first ends it, and the error names it.

    `wall_s` is the whole document's time, `page_wall_s` the longest pause between two pages (or before the
    first one), `cpu_s` the processor time the kernel grants. `memory_nbytes` bounds the address space, so it
    has to leave room for the interpreter (about 150 MiB). `text_nbytes` is the document's text as UTF-8.
    `unpacked_nbytes` bounds what a packed document (DOCX, EPUB) says its parts come to, `markup_nbytes` one part with
    text in it, or one HTML page.

    `ocr_languages` are those that scanned pages are read in, as Tesseract names them (``eng+deu``); empty: scanned
    pages are not read. `ocr_page_s` is the time for one of them.
    """

    max_pages: int = 5_000
    wall_s: float = 900.0
    page_wall_s: float = 60.0
    cpu_s: int = 600
    memory_nbytes: int = 2048 * _MIB
    text_nbytes: int = 64 * _MIB
    unpacked_nbytes: int = 1024 * _MIB
    markup_nbytes: int = 64 * _MIB
    ocr_languages: str = ""
    ocr_page_s: float = 45.0

    def __post_init__(self) -> None:
        times = (self.wall_s, self.page_wall_s, self.cpu_s, self.ocr_page_s)
        if min(*times, self.max_pages, self.text_nbytes, self.unpacked_nbytes, self.markup_nbytes) <= 0:
            raise ValueError("every limit must be above zero")
        if not _LANGUAGES.fullmatch(self.ocr_languages):
            raise ValueError("ocr_languages must be names of Tesseract's languages with + between, as eng+deu")
        if self.memory_nbytes < 128 * _MIB:
            raise ValueError("memory_nbytes must be at least 128 MiB: the parser process itself needs that")
