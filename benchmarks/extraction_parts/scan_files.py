"""Scanned pages: PDFs of pictures. They need Tesseract."""

import random
from collections.abc import Callable

from PIL import Image, ImageChops, ImageDraw, ImageFont
from reportlab.lib.pagesizes import A4
from reportlab.lib.utils import ImageReader, simpleSplit

from benchmarks.extraction_parts import story
from benchmarks.extraction_parts.pdf_files import FONT, HEIGHT, WIDTH, Sheet
from benchmarks.extraction_parts.story import Made


def _picture(text: str, angle: int = 0) -> Image.Image:
    """A page of text as a scanner sees it, 200 dots an inch."""
    image = Image.new("L", (1654, 2339), 255)
    font = ImageFont.load_default(size=34)
    lines = simpleSplit(text, FONT, 34, 1250)
    ImageDraw.Draw(image).multiline_text((160, 180), "\n".join(lines), font=font, fill=0, spacing=18)
    return image.rotate(angle, expand=True)


def _scan(*pictures: Image.Image) -> bytes:
    sheet = Sheet()
    for picture in pictures:
        size = A4 if picture.height > picture.width else (HEIGHT, WIDTH)
        sheet.canvas.setPageSize(size)
        sheet.canvas.drawImage(ImageReader(picture), 0, 0, *size)
        sheet.end_page()
    return sheet.bytes()


def scan_of(text: str, angle: int = 0) -> Made:
    """One page, put onto the glass at this angle."""
    return Made(_scan(_picture(text, angle)), text, 1)


def scanned() -> Made:
    texts = ["\n".join(story.ENGLISH[:3]), "\n".join(story.ENGLISH[3:6])]
    return Made(_scan(*map(_picture, texts)), "\n".join(texts), 2)


def scanned_sideways() -> Made:
    return scan_of("\n".join(story.ENGLISH[:4]), 90)


def scanned_badly() -> Made:
    """Askew, with specks and a shadow, 120 dots an inch."""
    text = "\n".join(story.ENGLISH[2:5])
    picture = _picture(text).rotate(1.2, fillcolor=235)
    specks = random.Random(6)
    draw = ImageDraw.Draw(picture)
    for _ in range(2_500):
        x, y = specks.randrange(picture.width), specks.randrange(picture.height)
        draw.ellipse((x, y, x + 2, y + 2), fill=specks.randrange(60, 220))
    shadow = Image.linear_gradient("L").resize(picture.size).point(lambda value: 255 - value // 4)
    picture = ImageChops.multiply(picture, shadow)
    return Made(_scan(picture.resize((picture.width * 3 // 5, picture.height * 3 // 5))), text, 1)


def scanned_in_columns() -> Made:
    sheet = Image.new("L", (2480, 3508), 255)
    font = ImageFont.load_default(size=40)
    lines = [line for text in story.ENGLISH[:6] for line in simpleSplit(text, FONT, 40, 900)]
    half = -(-len(lines) // 2)
    for number, part in enumerate((lines[:half], lines[half:])):
        place = (200 + 1120 * number, 250)
        ImageDraw.Draw(sheet).multiline_text(place, "\n".join(part), font=font, fill=0, spacing=20)
    return Made(_scan(sheet), "\n".join(story.ENGLISH[:6]), 1)


FILES: dict[str, Callable[[], Made]] = {
    "two scanned pages": scanned,
    "a page scanned sideways": scanned_sideways,
    "a page scanned badly": scanned_badly,
    "two columns scanned": scanned_in_columns,
}
