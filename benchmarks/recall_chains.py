"""Questions for `recall_places.py` whose answer needs two places of a document, and the sentences to plant for them.

A chain is two sentences: the first says something about a thing, the second something about what the first named.
Things, people and wordings are others than those by which index heads are found.
"""

import random
from dataclasses import dataclass
from typing import Literal

from recall_texts import FIRST, LAST, PLACES, ROOMS

Kind = Literal["chained", "both"]
STREETS = ("Linden Street", "Orchard Lane", "Station Road", "Canal Walk", "Bell Alley", "Tower Hill", "Quay Street",
           "Glover Row", "Priory Close", "Weaver Lane", "Cooper Street", "Ropery Walk")  # fmt: skip
FUNDS = ("Alder", "Birch", "Comet", "Delta", "Ember", "Falcon", "Granite", "Heron", "Iris", "Juniper", "Kestrel",
         "Lantern")  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


@dataclass(frozen=True)
class ChainWording:
    """`first` and `second` are the sentences, `chained` two questions that need both; `clause` asks for the first
    alone, as half of a question about two things."""

    first: str
    second: str
    chained: tuple[str, str]
    clause: str


CHAIN_WORDINGS = (
    ChainWording("The keeper of {x} is {name}.", "{name} can be reached at extension {number}.",
                 ("Which extension reaches the keeper of {x}?", "How do I phone the one who keeps {x}?"),
                 "who is the keeper of {x}"),
    ChainWording("Since spring {name} has been responsible for {x}.", "{name} lives at {house} {street}.",
                 ("At which address does the person responsible for {x} live?", "Where is the home of whoever is in "
                  "charge of {x}?"), "who is in charge of {x}"),
    ChainWording("The spare key to {x} is kept in {y}.", "The door of {y} is unlocked on {day} only.",
                 ("On which day can I get the spare key to {x}?", "When is the room open where the spare key to {x} "
                  "is kept?"), "where is the spare key to {x}"),
    ChainWording("Every morning {x} is unlocked by {name}.", "The car of {name} has the number plate {plate}.",
                 ("Which number plate has the car of the person who unlocks {x}?", "What does the number plate say of "
                  "the one who opens {x} every morning?"), "who unlocks {x} every morning"),
    ChainWording("Repairs of {x} are paid out of the {fund} fund.", "The {fund} fund is managed by {name}.",
                 ("Who manages the fund that pays for repairs of {x}?", "Whom do I ask for money when {x} needs "
                  "repairs?"), "which fund pays for repairs of {x}"),
)  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """A sentence with its place in no text yet; `planted` of `recall_texts` wants nothing else of a fact."""

    sentence: str


@dataclass(frozen=True)
class Asked:
    """A question, and the numbers of the two sentences that it needs; `answers`: what a right answer has in it."""

    text: str
    kind: Kind
    needs: tuple[int, int]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class _Chain:
    first: str
    second: str
    chained: tuple[str, str]
    clause: str
    middle: str
    end: str


def two_place_parts(n_documents: int, n_chains: int, seed: int = 7) -> list[tuple[list[Planted], list[Asked]]]:
    """For each document `n_chains` chains in every wording in turn: sentences in the order in which they are planted,
    the two of a chain at least `n_chains` // 2 sentences apart, either first; and the questions."""
    rng = random.Random(seed)
    things = [(place, room) for place in PLACES for room in ROOMS]
    people = [f"{first} {last}" for first in FIRST for last in LAST]
    for of in (things, people):
        rng.shuffle(of)
    made = [_chain(number, things, people, rng) for number in range(n_documents * n_chains)]
    return [_part(made[at : at + n_chains], rng) for at in range(0, len(made), n_chains)]


def _chain(number: int, things: list[tuple[str, str]], people: list[str], rng: random.Random) -> _Chain:
    wording = CHAIN_WORDINGS[number % len(CHAIN_WORDINGS)]
    used = len(things) // 2
    x, y = (f"the {place} {room}" for place, room in (things[number % used], things[used + number % used]))
    values = {
        "x": x, "y": y, "name": people[number], "number": str(rng.randint(1000, 9999)), "day": rng.choice(DAYS),
        "house": str(rng.randint(2, 99)), "street": rng.choice(STREETS), "fund": f"{FUNDS[number // 5 % 12]}",
        "plate": f"{rng.choice('ABCDEFGHKLM')}{rng.choice('NPRSTUVWXYZ')} {rng.randint(100, 999)}",
    }  # fmt: skip
    keys = ("number", "house", "day", "plate", "name")
    middle = {2: y, 4: values["fund"]}.get(number % 5, values["name"])
    texts = [text.format(**values) for text in (wording.first, wording.second, *wording.chained, wording.clause)]
    first, second, one, other, clause = texts
    return _Chain(_upper(first), _upper(second), (one, other), clause, middle, values[keys[number % 5]])


def _part(chains: list[_Chain], rng: random.Random) -> tuple[list[Planted], list[Asked]]:
    n = len(chains)
    order = rng.sample(range(n), n)
    shift = rng.sample(range(n), n)  # of the second halves, not nearer than half a round
    places = {}
    front = [(c, 0) if rng.random() < 0.5 else (c, 1) for c in order]
    behind = [(c, 1 - half) for c, half in sorted(front, key=lambda one: shift[one[0]] // 3 + order.index(one[0]))]
    for place, key in enumerate(front + behind):
        places[key] = place
    sentences = [chains[c].first if half == 0 else chains[c].second for c, half in front + behind]
    asked = [
        Asked(text, "chained", (places[c, 0], places[c, 1]), (chain.end,))
        for c, chain in enumerate(chains)
        for text in chain.chained
    ]
    for c, chain in enumerate(chains):
        other = chains[(c + 3) % n]
        text = f"{chain.clause}, and {other.clause}?"
        needs = places[c, 0], places[(c + 3) % n, 0]
        asked.append(Asked(_upper(text), "both", needs, (chain.middle, other.middle)))
    return [Planted(sentence) for sentence in sentences], asked


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]
