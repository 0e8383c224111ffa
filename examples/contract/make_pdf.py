"""Render `contract.md` to `contract.pdf`: the same source gives the same bytes (reportlab, standard fonts).

    python examples/contract/make_pdf.py

The source knows five kinds of lines: `# title`, `## heading`, `---` (new page), `| table | row |`, and text.
"""

import re
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from reportlab.lib.pagesizes import A4
from reportlab.pdfbase.pdfmetrics import stringWidth
from reportlab.pdfgen.canvas import Canvas

HERE = Path(__file__).parent
WIDTH, HEIGHT = A4
MARGIN = 84.0
FOOT = 56.0
TIE = "\x1f"


@dataclass(frozen=True)
class Style:
    """Sizes are in points; `before` is the white space above a piece of text."""

    font: str
    size: float
    leading: float
    before: float


TITLE = Style("Helvetica-Bold", 24, 30, 120)
HEADING = Style("Helvetica-Bold", 15, 20, 24)
CLAUSE = Style("Helvetica", 11.5, 17, 9)
CELL = Style("Helvetica", 9, 19, 0)


def tie(text: str) -> str:
    """Join numbers to their units and the words of names, so that no line ends inside a value."""
    text = re.sub(r"(?<=\d) (?=[A-Za-z])", TIE, text)
    return re.sub(r"(?<![.:] )\b([A-Z][a-z]+) (?=[A-Z0-9])", rf"\1{TIE}", text)


def wrap(text: str, style: Style, width: float) -> list[str]:
    """Lines of at most `width` points; words are never split."""
    lines: list[str] = []
    for word in tie(text).split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and stringWidth(longer, style.font, style.size) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return [line.replace(TIE, " ") for line in lines]


class Pages:
    """A canvas with a cursor that moves down the page and starts another when a piece does not fit."""

    def __init__(self, target: BytesIO, title: str) -> None:
        self.canvas = Canvas(target, pagesize=A4, invariant=1)
        self.canvas.setTitle(title)
        self.canvas.setAuthor("The Preread authors")
        self.y = HEIGHT - MARGIN

    def finish_page(self) -> None:
        self.canvas.setFont("Helvetica", 9)
        self.canvas.drawCentredString(WIDTH / 2, FOOT, f"Page {self.canvas.getPageNumber()}")
        self.canvas.showPage()
        self.y = HEIGHT - MARGIN

    def need(self, height: float) -> None:
        """Start a new page unless `height` points are left on this one."""
        if self.y - height < MARGIN:
            self.finish_page()

    def text(self, text: str, style: Style, follow: float = 0.0) -> None:
        """Place a paragraph whole, together with `follow` points of what comes after it."""
        lines = wrap(text, style, WIDTH - 2 * MARGIN)
        self.need(style.before + style.leading * len(lines) + follow)
        self.y -= style.before
        self.canvas.setFont(style.font, style.size)
        for line in lines:
            self.y -= style.leading
            self.canvas.drawString(MARGIN, self.y, line)

    def table(self, rows: list[list[str]]) -> None:
        """Place a ruled table; its columns are as wide as their longest cell, its first row is bold.

        Each row is one text object, so that a reader of the text gets it as one line.
        """
        self.need(CELL.leading * (len(rows) + 1))
        fonts = [HEADING.font] + [CELL.font] * (len(rows) - 1)
        columns = zip(*rows, strict=True)
        widths = [
            max(stringWidth(cell, font, CELL.size) for cell, font in zip(column, fonts, strict=True)) + 8
            for column in columns
        ]
        self.y -= 10
        for font, row in zip(fonts, rows, strict=True):
            self.canvas.line(MARGIN, self.y, MARGIN + sum(widths), self.y)
            self.y -= CELL.leading
            line = self.canvas.beginText()
            line.setFont(font, CELL.size)
            for column, cell in enumerate(row):
                line.setTextOrigin(MARGIN + sum(widths[:column]) + 4, self.y + 6)
                line.textOut(cell)
            self.canvas.drawText(line)
        self.canvas.line(MARGIN, self.y, MARGIN + sum(widths), self.y)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def render(source: str) -> bytes:
    """The PDF of a source text, byte for byte the same every time."""
    blocks = [block.strip() for block in source.split("\n\n") if block.strip()]
    target = BytesIO()
    pages = Pages(target, blocks[0].removeprefix("# "))
    for block in blocks:
        if block == "---":
            pages.finish_page()
        elif block.startswith("# "):
            pages.text(block[2:], TITLE)
        elif block.startswith("## "):
            pages.text(block[3:], HEADING, follow=3 * CLAUSE.leading)
        elif block.startswith("|"):
            pages.table([cells(line) for line in block.splitlines() if not line.startswith("|---")])
        else:
            pages.text(block, CLAUSE)
    pages.finish_page()
    pages.canvas.save()
    return target.getvalue()


def main() -> None:
    source = (HERE / "contract.md").read_text(encoding="utf-8")
    (HERE / "contract.pdf").write_bytes(render(source))


if __name__ == "__main__":
    main()
