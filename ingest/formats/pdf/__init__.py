"""PDF: text by pypdf; the order of columns and pictures of scanned pages by PDFium."""

from ingest.formats.pdf.reader import PdfFile, RawPage, open_pdf

__all__ = ["PdfFile", "RawPage", "open_pdf"]
