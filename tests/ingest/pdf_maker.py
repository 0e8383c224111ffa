"""PDFs for the tests of this folder, good and bad, made on the fly."""

import io
import zlib

from PIL import Image
from pypdf import PdfReader, PdfWriter
from reportlab.lib.utils import ImageReader
from reportlab.pdfgen.canvas import Canvas

HELVETICA = b"/Font<</F1<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>"
SENTENCE = "the supplier pays EUR 4,500 within thirty days"


class PdfMaker:
    """Small PDFs as bytes; each method is one kind of file people upload."""

    @staticmethod
    def with_text(*pages: str) -> bytes:
        """One page per argument, its lines from top to bottom; an empty one stays blank."""
        buffer = io.BytesIO()
        canvas = Canvas(buffer, invariant=1)
        for page in pages:
            for index, line in enumerate(page.splitlines()):
                canvas.drawString(72, 720 - 14 * index, line)
            canvas.showPage()
        canvas.save()
        return buffer.getvalue()

    @staticmethod
    def scanned(n_pages: int, *, text_on: tuple[int, ...] = ()) -> bytes:
        """Pages that hold one picture each; those in `text_on` (from 1) have text instead."""
        buffer = io.BytesIO()
        canvas = Canvas(buffer, invariant=1)
        picture = ImageReader(Image.new("L", (60, 80), 200))
        for number in range(1, n_pages + 1):
            if number in text_on:
                canvas.drawString(72, 720, f"Page {number}: {SENTENCE}.")
            else:
                canvas.drawImage(picture, 72, 200, 400, 500)
            canvas.showPage()
        canvas.save()
        return buffer.getvalue()

    def encrypted(self, user: str, owner: str | None = None, algorithm: str = "AES-256") -> bytes:
        writer = PdfWriter(clone_from=PdfReader(io.BytesIO(self.with_text(f"Secret: {SENTENCE}."))))
        writer.encrypt(user, owner, algorithm=algorithm)
        return written(writer)

    @staticmethod
    def blank(n_pages: int) -> bytes:
        writer = PdfWriter()
        for _ in range(n_pages):
            writer.add_blank_page(200, 200)
        return written(writer)

    @staticmethod
    def from_objects(*objects: bytes) -> bytes:
        """A file of raw objects, numbered from 1; object 1 is the catalog."""
        body, offsets = b"%PDF-1.7\n", []
        for number, content in enumerate(objects, start=1):
            offsets.append(len(body))
            body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
        table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
        size = len(objects) + 1
        trailer = b"trailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (size, len(body))
        return body + b"xref\n0 %d\n0000000000 65535 f \n" % size + table + trailer

    @staticmethod
    def stream(content: bytes, entries: bytes = b"") -> bytes:
        packed = zlib.compress(content)
        return b"<</Length %d/Filter/FlateDecode%s>>stream\n%s\nendstream" % (len(packed), entries, packed)

    def one_page(self, content: bytes, *more: bytes, resources: bytes = b"") -> bytes:
        """A page with this content stream; `more` objects follow from number 5."""
        return self.from_objects(
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<<%s>>>>" % resources,
            self.stream(content),
            *more,
        )

    def hanging(self) -> bytes:
        """4,000 drawings of a form that takes a good part of a second, each below pypdf's own limits."""
        form = self.stream(
            b"BT /F1 9 Tf " + b"1 0 0 1 5 5 Tm (a b c) Tj " * 20_000 + b"ET",
            b"/Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources<<%s>>" % HELVETICA,
        )
        return self.one_page(b"/X Do " * 4_000, form, resources=HELVETICA + b"/XObject<</X 5 0 R>>")

    def memory_eater(self) -> bytes:
        """A file of 73 KB whose page is one word of 74 million letters, just below pypdf's own limit."""
        return self.one_page(b"BT /F1 9 Tf (" + b"a" * 74_000_000 + b")Tj ET", resources=HELVETICA)

    def over_pypdf_limits(self) -> bytes:
        return self.one_page(b"BT /F1 9 Tf (" + b"a" * 76_000_000 + b")Tj ET", resources=HELVETICA)


def written(writer: PdfWriter) -> bytes:
    buffer = io.BytesIO()
    writer.write(buffer)
    return buffer.getvalue()
