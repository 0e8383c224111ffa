"""How well questions are answered from a part of a document's KV: selection, fitted slots, fetched spans.

    python -m benchmarks.fidelity --model DIR --out DIR [--device cuda] [--limit-s 500]
    python -m benchmarks.fidelity --page DIR        # put DIR/fidelity.json into docs/fidelity.md

Each document is compressed once, before any of its questions is known, and asked about 40 things that were planted in
it. Everything is FP32. Results are written after each document, so that a run that is stopped keeps what it has; a new
document is begun only while there is time for it.
"""

import argparse
import os
import time
from pathlib import Path

import torch

from benchmarks.bench_report import write_section
from benchmarks.fidelity_parts.documents import Document, make_documents
from benchmarks.fidelity_parts.methods import FITS, RATIOS, REPLAYS, Trial
from benchmarks.fidelity_parts.page import section
from benchmarks.fidelity_parts.plot import plot
from benchmarks.fidelity_parts.reader import Reader
from benchmarks.fidelity_parts.summary import Collected, Report

DOCS = Path(__file__).parents[1] / "docs"


def run(options: argparse.Namespace) -> Report:
    """Measure documents until there is no more time, or no more of them."""
    started = time.perf_counter()
    reader = Reader(options.model, options.device)
    documents = make_documents(
        reader.tokenizer, reader.prompt, options.documents, options.tokens, options.seed, options.facts
    )
    collected = Collected()
    longest = 0.0
    report = _report(reader, [], collected, options, 0.0)
    for i, document in enumerate(documents):
        begun = time.perf_counter()
        if i and begun - started + 1.2 * longest > options.limit_s:
            break
        _measure(reader, document, collected, options)
        longest = max(longest, time.perf_counter() - begun)
        report = _report(reader, documents[: i + 1], collected, options, time.perf_counter() - started)
        report.save(options.out / "fidelity.json")
        print(f"document {i}: {time.perf_counter() - begun:.1f} s", flush=True)
    return report


@torch.inference_mode()
def _measure(reader: Reader, document: Document, collected: Collected, options: argparse.Namespace) -> None:
    wordings = {name: how for name, how in REPLAYS.items() if _wanted(name, options.replays)}
    fits = {name: how for name, how in FITS.items() if _wanted(name, options.fits)}
    trial = Trial(reader, document, wordings)
    collected.begin([q.kind for q in document.questions])
    for measured in trial.references():
        collected.add(measured)
    for ratio in options.ratios:
        for measured in trial.at(ratio, fits):
            collected.add(measured)


def _wanted(name: str, names: list[str] | None) -> bool:
    return names is None or name in names


def _report(
    reader: Reader, documents: list[Document], collected: Collected, options: argparse.Namespace, seconds: float
) -> Report:
    on_card = reader.device.type == "cuda"
    return Report(
        model=reader.card.source,
        machine=torch.cuda.get_device_name() if on_card else f"{torch.get_num_threads()} CPU threads",
        seconds=round(seconds, 1),
        seed=options.seed,
        document_tokens=[len(d.ids) for d in documents],
        documents=[d.digest for d in documents],
        n_questions=sum(len(d.questions) for d in documents),
        full=collected.mean_nll("full"),
        none=collected.mean_nll("no document"),
        lines=collected.lines(),
    )


def write_page(found: Path, docs: Path = DOCS) -> None:
    """Put a run's results into docs/fidelity.md, with its plot beside it."""
    report = Report.load(found / "fidelity.json")
    (docs / "fidelity.svg").write_text(plot(report), encoding="utf-8")
    write_section("kept rows", section(report), docs / "fidelity.md")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="an imported model's directory")
    parser.add_argument("--out", type=Path, default=Path("."), help="where fidelity.json is written")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit-s", type=float, default=3600)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4000, help="of each document")
    parser.add_argument("--facts", type=int, default=8, help="planted of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ratios", type=int, nargs="+", default=list(RATIOS))
    parser.add_argument("--replays", nargs="+", choices=REPLAYS, help="all when not given")
    parser.add_argument("--fits", nargs="*", choices=FITS, help="all when not given")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--page", type=Path, help="only write the page, from this folder's fidelity.json")
    return parser.parse_args()


def main() -> None:
    options = _options()
    if options.page is not None:
        write_page(options.page)
        return
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    print(section(run(options)))


if __name__ == "__main__":
    main()
