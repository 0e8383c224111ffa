"""How many words of documents whose text is known come out, and in the right order: writes docs/extraction.md.

    python -m benchmarks.extraction

Scanned pages are left out where Tesseract is not installed.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.extraction_parts.corpus import FORMATS, Outcome, read
from ingest.limits import ParseLimits
from ingest.ocr import find_recognizer

PAGE = Path(__file__).parents[1] / "docs" / "extraction.md"
LIMITS = ParseLimits(ocr_languages="eng")
INTRO = """# Extraction

Written by `benchmarks/extraction.py`; do not edit. {n} documents whose text is known are made, read as uploads are, and
compared word by word. They are made by python-docx, reportlab, pypdf and zipfile for this purpose: each has one thing
in it that documents of its format trip readers over. Documents from the world are less tidy, and of those nothing is
measured here.

*Recall*: words of the known text that came out, in its order. *Precision*: words that came out which are in the known
text, in its order. *Accuracy* is both at once: twice the words in order by the sum of both texts' words. A word
that came out in the wrong place counts as missing and as too much.

| format | documents | words | recall | precision | accuracy | worst document |
|---|---:|---:|---:|---:|---:|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE)
    arguments = parser.parse_args()
    outcomes = measured()
    arguments.out.write_text(page(outcomes), encoding="utf-8")
    sys.stdout.write(f"{arguments.out}\n")
    return 0


def measured() -> dict[str, dict[str, Outcome]]:
    """What came out of every document, by format and name."""
    recognizer, _ = find_recognizer(LIMITS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "upload"
        return {
            kind: {name: read(make(), path, LIMITS) for name, make in files.items()}
            for kind, files in FORMATS.items()
            if recognizer is not None or kind != "PDF, scanned"
        }


def page(outcomes: dict[str, dict[str, Outcome]]) -> str:
    """The page of the documentation."""
    n = sum(map(len, outcomes.values()))
    lines = [_summary(kind, files) for kind, files in outcomes.items()]
    return "".join([INTRO.format(n=n), *lines, *map(_table, outcomes, outcomes.values()), _tesseract(outcomes)])


def _summary(kind: str, files: dict[str, Outcome]) -> str:
    scores = [outcome.score for outcome in files.values()]
    n_truth, n_found = sum(each.n_truth for each in scores), sum(each.n_found for each in scores)
    in_order = sum(each.in_order for each in scores)
    worst, lowest = min(((name, outcome.score.accuracy) for name, outcome in files.items()), key=lambda pair: pair[1])
    return (
        f"| {kind} | {len(files)} | {n_truth:,} | {_percent(in_order / n_truth)} | {_percent(in_order / n_found)} | "
        f"{_percent(2 * in_order / (n_truth + n_found))} | {worst} ({_percent(lowest)}) |\n"
    )


def _table(kind: str, files: dict[str, Outcome]) -> str:
    lines = [
        f"\n## {kind}\n\n| document | pages | words | recall | precision | accuracy |\n|---|---:|---:|---:|---:|---:|\n"
    ]
    for name, outcome in files.items():
        got = outcome.score
        lines.append(
            f"| {name} | {len(outcome.pages)} | {got.n_truth:,} | {_percent(got.recall)} | {_percent(got.precision)} | "
            f"{_percent(got.accuracy)} |\n"
        )
    return "".join(lines)


def _tesseract(outcomes: dict[str, dict[str, Outcome]]) -> str:
    if "PDF, scanned" not in outcomes:
        return "\nScanned pages were left out: Tesseract was not installed.\n"
    told = subprocess.run(["tesseract", "--version"], capture_output=True, text=True, check=True)
    return f"\nScanned pages were read by {told.stdout.splitlines()[0]}, with its English data.\n"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    sys.exit(main())
