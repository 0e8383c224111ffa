"""What `preread plan` expects of each card, for two shapes of model: a section of docs/cards.md.

    python -m benchmarks.cards_page [--write]

Nothing is loaded and no card is needed: these are bounds, from table and headers, not measurements.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.bench_report import table, write_section
from service.planning.cards import CARDS, FIRST_EXL2, Card
from service.planning.estimates import Reading, bandwidth_bound
from service.planning.ledgers import read_nbytes, step_nbytes
from service.planning.model import Dimensions, ModelFacts, from_dimensions
from service.planning.request import Wanted
from service.planning.search import settings_that_fit

PAGE = Path(__file__).parents[1] / "docs" / "cards.md"
MODELS = {
    "8B": Dimensions(layers=32, kv_heads=8, head_dim=128, heads=32, hidden=4096, params_b=8.0),
    "27B": Dimensions(layers=40, kv_heads=4, head_dim=128, params_b=27.0),
}
CONTEXT = 32_768
LEAST_BITS = 3.0
"""Weights of fewer make too little sense to be recommended."""


def row(key: str, card: Card) -> Iterator[str]:
    """A card's line: for each model the best settings that fit, and the bounds with them."""
    yield from (f"`{key}`", f"{card.memory_nbytes / 2**30:.0f} GiB", f"{card.bandwidth_gbps:.0f}", card.architecture)
    for given in MODELS.values():
        yield "llama.cpp only" if (card.capability or FIRST_EXL2) < FIRST_EXL2 else best(given, card)


def best(given: Dimensions, card: Card) -> str:
    """Bits of weights, KV type and retention, then tokens a second at most at 0 and at all of the rows."""
    wanted = Wanted(context=CONTEXT)
    fits = [s for s in settings_that_fit(from_dimensions(given), card, wanted) if s.bits >= LEAST_BITS]
    if not fits:
        return "does not fit"
    setting = fits[0]
    chosen = from_dimensions(replace(given, bits=setting.bits))
    empty = bound(chosen, card, wanted)
    return f"{setting.bits:g} bits, {setting.kv_type}, {setting.rows:,} rows: {empty:.0f} to {setting.tok_s:.0f} tok/s"


def bound(model: ModelFacts, card: Card, wanted: Wanted) -> float:
    reading = Reading(step_nbytes(model, card, wanted), read_nbytes(model, card, wanted))
    return bandwidth_bound(card.bandwidth_gbps, reading.nbytes(0))


def text() -> str:
    header = ["card", "memory", "GB/s", "", *(f"{name}, {CONTEXT:,} tokens" for name in MODELS)]
    return table(header, [list(row(key, card)) for key, card in CARDS.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/cards.md")
    made = text()
    if parser.parse_args().write:
        write_section("plan of every card", made, PAGE)
    print(made)


if __name__ == "__main__":
    main()
