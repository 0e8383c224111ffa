"""All files of the corpus by format, and what came out of one of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.extraction_parts import book_files, pdf_files, plain_files, scan_files, web_files, word_files
from benchmarks.extraction_parts.score import Score, score
from benchmarks.extraction_parts.story import Made
from ingest.extract import extract
from ingest.limits import ParseLimits
from ingest.wire import PageRead

FORMATS: dict[str, dict[str, Callable[[], Made]]] = {
    "PDF": pdf_files.FILES,
    "PDF, scanned": scan_files.FILES,
    "DOCX": word_files.FILES,
    "HTML": web_files.FILES,
    "EPUB": book_files.FILES,
    "Markdown": plain_files.MARKDOWN,
    "text": plain_files.TEXT,
}


@dataclass(frozen=True)
class Outcome:
    """`pages` are the texts that came out, `labels` their names."""

    made: Made
    pages: list[str]
    labels: list[str | None]

    @property
    def score(self) -> Score:
        return score(self.made.truth, "\n".join(self.pages))


def read(made: Made, path: Path, limits: ParseLimits) -> Outcome:
    """What is read of the file, which is written to `path` for it."""
    path.write_bytes(made.data)
    pages = [message for message in extract(path, limits) if isinstance(message, PageRead)]
    return Outcome(made, [page.text for page in pages], [page.label for page in pages])
