"""What pypdf does not tell: where text stands on the page, and what the page looks like. By PDFium."""

import math
from pathlib import Path

import pypdfium2

from ingest.formats.pdf.columns import Box, column_order

OCR_DPI = 300
_MOST_PIXELS = 25_000_000
_MOST_BOXES = 4_000
_LEAST_BOXES = 12


class SecondReader:
    """A PDF read by PDFium. Each method gives None where that makes nothing of it."""

    def __init__(self, path: Path, password: str | None, n_pages: int) -> None:
        """Raises PdfiumError for a file that it does not open, or in which it finds other pages than these."""
        self._pdf = pypdfium2.PdfDocument(path, password=password)
        if len(self._pdf) != n_pages:
            raise pypdfium2.PdfiumError("other pages")

    def in_columns(self, index: int) -> str | None:
        """The text of a page whose columns its file mixes; None for all others."""
        try:
            return _in_columns(self._pdf[index])
        except pypdfium2.PdfiumError:
            return None

    def picture(self, index: int) -> bytes | None:
        """The page as a grey picture (PGM) for text recognition, 300 dots an inch, fewer for very large pages."""
        try:
            page = self._pdf[index]
            width, height = page.get_size()
            scale = min(OCR_DPI / 72, math.sqrt(_MOST_PIXELS / max(1.0, width * height)))
            return _grey(page.render(scale=scale, grayscale=True))  # pyright: ignore[reportArgumentType]
        except pypdfium2.PdfiumError:
            return None


def second_reader(path: Path, password: str | None, n_pages: int) -> SecondReader | None:
    """PDFium on a file of so many pages, None where it does not read them."""
    try:
        return SecondReader(path, password, n_pages)
    except pypdfium2.PdfiumError:
        return None


def _in_columns(page: pypdfium2.PdfPage) -> str | None:
    text = page.get_textpage()
    n_boxes = text.count_rects()
    if not _LEAST_BOXES <= n_boxes <= _MOST_BOXES:
        return None
    places = [text.get_rect(index) for index in range(n_boxes)]
    boxes = [_upright(Box(*place), page.get_rotation()) for place in places]
    lines = column_order(boxes)
    if lines is None:
        return None
    return "\n".join(_line([(boxes[index], text.get_text_bounded(*places[index])) for index in line]) for line in lines)


def _upright(box: Box, rotation: int) -> Box:
    """The box as the page is shown: `rotation` is clockwise, in degrees."""
    match rotation:
        case 90:
            return Box(box.bottom, -box.right, box.top, -box.left)
        case 180:
            return Box(-box.right, -box.top, -box.left, -box.bottom)
        case 270:
            return Box(-box.top, box.left, -box.bottom, box.right)
    return box


def _line(runs: list[tuple[Box, str]]) -> str:
    line, reach = "", -math.inf
    for box, text in runs:
        clean = text.replace("\ufffe", "-").replace("\x02", "-").replace("\r\n", " ").strip("\r\n")
        gap = " " if line and box.left - reach > 0.1 * (box.top - box.bottom) else ""
        line += gap + clean
        reach = box.right
    return line


def _grey(bitmap: pypdfium2.PdfBitmap) -> bytes:
    """A portable grey map of it, its rows without what fills them up."""
    pixels = bytes(bitmap.buffer)
    if bitmap.stride != bitmap.width:
        starts = range(0, bitmap.stride * bitmap.height, bitmap.stride)
        pixels = b"".join(pixels[start : start + bitmap.width] for start in starts)
    return b"P5 %d %d 255\n" % (bitmap.width, bitmap.height) + pixels
