"""PDFs as they come: by reportlab where a page is drawn, by pypdf where it is labelled, turned or locked."""

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from pypdf import PdfReader, PdfWriter
from pypdf.constants import PageLabelStyle
from reportlab.lib.pagesizes import A4
from reportlab.lib.utils import simpleSplit
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.cidfonts import UnicodeCIDFont
from reportlab.pdfgen.canvas import Canvas

from benchmarks.extraction_parts import story
from benchmarks.extraction_parts.story import Made
from tests.ingest.pdf_maker import PdfMaker, written

WIDTH, HEIGHT = A4
FONT, SIZE, LEADING = "Helvetica", 10.0, 13.0


class Sheet:
    """A canvas, and its bytes at the end."""

    def __init__(self, size: tuple[float, float] = A4) -> None:
        self._buffer = io.BytesIO()
        self.canvas = Canvas(
            self._buffer, pagesize=size, invariant=1, initialFontName=FONT, initialFontSize=SIZE, initialLeading=LEADING
        )

    def lines(self, lines: list[str], x: float, top: float, leading: float = LEADING) -> None:
        for number, line in enumerate(lines):
            self.canvas.drawString(x, top - leading * number, line)

    def end_page(self) -> None:
        self.canvas.showPage()

    def bytes(self) -> bytes:
        self.canvas.save()
        return self._buffer.getvalue()


def wrapped(text: str, width: float, size: float = SIZE) -> list[str]:
    return simpleSplit(text, FONT, size, width)


def single() -> Made:
    sheet = Sheet()
    for first in (0, 4):
        texts = story.ENGLISH[first : first + 4]
        sheet.lines([line for text in texts for line in [*wrapped(text, 440), ""]], 72, 760)
        sheet.end_page()
    return Made(sheet.bytes(), "\n".join(story.ENGLISH), 2)


def _columns(n: int) -> tuple[list[list[str]], float]:
    """The lines of n columns, and how far they are apart."""
    step = 470 / n
    lines = [line for text in story.ENGLISH for line in wrapped(text, step - 20, 9)]
    height = -(-len(lines) // n)
    return [lines[start : start + height] for start in range(0, len(lines), height)], step


def columns_in_order() -> Made:
    sheet = Sheet()
    sheet.canvas.setFont(FONT, 9)
    columns, step = _columns(2)
    for number, column in enumerate(columns):
        sheet.lines(column, 60 + step * number, 740)
    return Made(sheet.bytes(), "\n".join(story.ENGLISH), 1)


def columns_line_by_line(n: int = 2) -> Made:
    """Lines of the same height together, as some programs write them; a title over all columns."""
    sheet = Sheet()
    sheet.canvas.drawString(60, 780, "Rules of the Harbour: what every skipper and every visitor should know of them")
    sheet.canvas.setFont(FONT, 9)
    columns, step = _columns(n)
    for row in range(len(columns[0])):
        for number, column in enumerate(columns):
            if row < len(column):
                sheet.canvas.drawString(60 + step * number, 740 - 12 * row, column[row])
    title = "Rules of the Harbour: what every skipper and every visitor should know of them"
    return Made(sheet.bytes(), "\n".join([title, *story.ENGLISH]), 1)


def three_columns() -> Made:
    return columns_line_by_line(3)


def columns_word_by_word() -> Made:
    """Every word placed by itself, line by line over both columns."""
    sheet = Sheet()
    sheet.canvas.setFont(FONT, 9)
    columns, step = _columns(2)
    space = pdfmetrics.stringWidth(" ", FONT, 9)
    for row in range(len(columns[0])):
        for number, column in enumerate(columns):
            x = 60 + step * number
            for word in column[row].split() if row < len(column) else ():
                sheet.canvas.drawString(x, 740 - 12 * row, word)
                x += pdfmetrics.stringWidth(word, FONT, 9) + space
    return Made(sheet.bytes(), "\n".join(story.ENGLISH), 1)


def table() -> Made:
    """A table of two wide columns, which is no text in columns."""
    rows = [
        (f"Berth {n}, {'north' if n % 2 else 'south'} quay", f"EUR {n * 150:,} a year for {n + 9} m")
        for n in range(1, 25)
    ]
    sheet = Sheet()
    for number, (left, right) in enumerate(rows):
        sheet.canvas.drawString(72, 760 - 16 * number, left)
        sheet.canvas.drawString(330, 760 - 16 * number, right)
    return Made(sheet.bytes(), "\n".join(f"{left} {right}" for left, right in rows), 1)


def fees() -> Made:
    sheet = Sheet()
    sheet.lines(wrapped(story.ENGLISH[1], 440), 72, 760)
    for number, row in enumerate(story.FEES):
        for column, cell in enumerate(row):
            sheet.canvas.drawString(72 + 140 * column, 680 - 16 * number, cell)
    truth = "\n".join([story.ENGLISH[1], *(" ".join(row) for row in story.FEES)])
    return Made(sheet.bytes(), truth, 1)


def turned(angle: int) -> Made:
    """Pages scanned or printed the other way: the text is drawn turned, and the page's own rotation sets it right."""
    sheet = Sheet((WIDTH, HEIGHT))
    lines = [line for text in story.ENGLISH[:4] for line in wrapped(text, 420)]
    canvas = sheet.canvas
    canvas.translate(*{90: (WIDTH, 0), 180: (WIDTH, HEIGHT), 270: (0, HEIGHT)}[angle])
    canvas.rotate(angle)
    sheet.lines(lines, 60, 500)
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(sheet.bytes())))
    writer.pages[0].rotate(angle)
    return Made(written(writer), "\n".join(story.ENGLISH[:4]), 1)


def turned_columns() -> Made:
    """Two columns line by line on a page that is turned."""
    sheet = Sheet()
    canvas = sheet.canvas
    canvas.translate(WIDTH, 0)
    canvas.rotate(90)
    canvas.setFont(FONT, 9)
    lines = [line for text in story.ENGLISH for line in wrapped(text, 330, 9)]
    half = -(-len(lines) // 2)
    for row in range(half):
        canvas.drawString(50, 540 - 12 * row, lines[row])
        if half + row < len(lines):
            canvas.drawString(430, 540 - 12 * row, lines[half + row])
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(sheet.bytes())))
    writer.pages[0].rotate(90)
    return Made(written(writer), "\n".join(story.ENGLISH), 1)


def sideways() -> Made:
    """A landscape page whose text runs up the sheet, with nothing that says so."""
    sheet = Sheet()
    sheet.canvas.translate(WIDTH, 0)
    sheet.canvas.rotate(90)
    sheet.lines([line for text in story.ENGLISH[:3] for line in wrapped(text, 600)], 60, 520)
    return Made(sheet.bytes(), "\n".join(story.ENGLISH[:3]), 1)


def _hyphenated(text: str, width: float, mark: str) -> Iterator[str]:
    """Lines that break long words, each with `mark` at the break."""
    line = ""
    for word in text.split():
        joined = f"{line} {word}".strip()
        if len(joined) <= width:
            line = joined
            continue
        room = int(width - len(line) - 2)
        if word.isalpha() and len(word) >= 8 and 3 <= room <= len(word) - 3:
            yield f"{line} {word[:room]}{mark}"
            line = word[room:]
        else:
            yield line
            line = word
    yield line


def hyphens(mark: str) -> Made:
    sheet = Sheet()
    sheet.lines([line for text in story.ENGLISH[:5] for line in _hyphenated(text, 40, mark)], 72, 760)
    return Made(sheet.bytes(), "\n".join(story.ENGLISH[:5]), 1)


def ligatures() -> Made:
    """Letters that are set as one: a font whose map gives U+FB01 and its kin."""
    text = "The office files five final figures; the flag is flown, and the fluffy traffic suffices."
    drawn = text
    for letters, one in (("ffi", "\ufb03"), ("ffl", "\ufb04"), ("ff", "\ufb00"), ("fi", "\ufb01"), ("fl", "\ufb02")):
        drawn = drawn.replace(letters, one)
    codes = {character: number for number, character in enumerate(dict.fromkeys(drawn), start=33)}
    mapping = "".join(f"<{code:02x}> <{ord(character):04x}>\n" for character, code in codes.items())
    cmap = (
        "/CIDInit /ProcSet findresource begin begincmap /CMapName /x def 1 begincodespacerange <00> <ff> "
        f"endcodespacerange {len(codes)} beginbfchar\n{mapping}endbfchar endcmap end"
    ).encode()
    string = "".join(f"{codes[character]:02x}" for character in drawn).encode()
    content = b"BT /F1 10 Tf 72 700 Td <" + string + b"> Tj ET"
    objects = (
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(content), content),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/ToUnicode 6 0 R>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(cmap), cmap),
    )
    return Made(PdfMaker.from_objects(*objects), text, 1)


def labels() -> Made:
    """Front pages in Roman numbers, then the text, then an annex."""
    sheet = Sheet()
    for text in story.ENGLISH[:6]:
        sheet.lines(wrapped(text, 440), 72, 760)
        sheet.end_page()
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(sheet.bytes())))
    writer.set_page_label(0, 1, style=PageLabelStyle.LOWERCASE_ROMAN)
    writer.set_page_label(2, 3, style=PageLabelStyle.DECIMAL)
    writer.set_page_label(4, 5, style=PageLabelStyle.DECIMAL, prefix="A-")
    return Made(written(writer), "\n".join(story.ENGLISH[:6]), 6, ("i", "ii", "1", "2", "A-1", "A-2"))


def form() -> Made:
    """A form that was filled in: its values are no part of the page's contents."""
    sheet = Sheet()
    canvas = sheet.canvas
    canvas.drawString(72, 760, "Application for a berth")
    canvas.acroForm.textfield(name="holder", tooltip="Holder", value="Ada Finch", x=72, y=700, width=200, height=20)
    canvas.acroForm.textfield(name="length", tooltip="Length", value="24 m", x=72, y=660, width=200, height=20)
    canvas.acroForm.choice(
        name="quay", tooltip="Quay", value="North", options=["North", "South"], x=72, y=620, width=200, height=20
    )
    canvas.acroForm.checkbox(name="pilot", tooltip="Pilot service", checked=True, x=72, y=580)
    return Made(sheet.bytes(), "Application for a berth Holder: Ada Finch Length: 24 m Quay: North Pilot service", 1)


def chinese() -> Made:
    pdfmetrics.registerFont(UnicodeCIDFont("STSong-Light"))
    sheet = Sheet()
    sheet.canvas.setFont("STSong-Light", 12)
    text = story.CHINESE[0]
    sheet.lines([text[start : start + 30] for start in range(0, len(text), 30)], 72, 760, 18)
    return Made(sheet.bytes(), text, 1)


def encrypted() -> Made:
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(single().data)))
    writer.encrypt("", "owner", algorithm="AES-256")
    return Made(written(writer), "\n".join(story.ENGLISH), 2)


def contract() -> Made:
    """The example contract: sixteen pages with clauses, tables, heads and feet. The truth is what it is made from."""
    folder = Path(__file__).parents[2] / "examples" / "contract"
    source = (folder / "contract.md").read_text(encoding="utf-8")
    truth = "\n".join(line for line in source.splitlines() if not re.fullmatch(r"-{3,}|[|\s:-]+", line))
    return Made((folder / "contract.pdf").read_bytes(), truth)


FILES: dict[str, Callable[[], Made]] = {
    "one column": single,
    "two columns in order": columns_in_order,
    "two columns line by line": columns_line_by_line,
    "three columns line by line": three_columns,
    "two columns word by word": columns_word_by_word,
    "two columns, page turned": turned_columns,
    "table of two wide columns": table,
    "text and a table": fees,
    "page turned by 90": lambda: turned(90),
    "page turned by 180": lambda: turned(180),
    "page turned by 270": lambda: turned(270),
    "text up the sheet": sideways,
    "hyphens at line ends": lambda: hyphens("-"),
    "soft hyphens at line ends": lambda: hyphens("\u00ad"),
    "ligatures": ligatures,
    "page labels": labels,
    "form": form,
    "Chinese": chinese,
    "encrypted, no password needed": encrypted,
    "the example contract": contract,
}
