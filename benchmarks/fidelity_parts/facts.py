"""Invented facts of four kinds that are planted in a document, each with the question that asks for it.

``prose`` a name in a sentence; ``code`` and ``uuid`` strings without redundancy; ``cell`` a cell of a table;
``aggregate`` what most of many scattered sentences say.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

KINDS = ("prose", "code", "uuid", "cell", "aggregate")
STRINGS = ("code", "uuid")

_NAMES = {
    "first": "Marta Jonas Priya Tomas Aiko Luis Nadia Owen Sofia Pavel Ingrid Kwame Leila Mateo Yusuf Hana Viktor "
    "Elena Rafael Chloe Amara Felix Greta Karim Lena Milan Oscar Petra Rosa Stefan Tara Vera Anders Bianca Emil Farah",
    "last": "Kovalenko Eide Raman Bilek Tanabe Ferrer Haddad Clarke Lindgren Dusek Solberg Mensah Farouk Alvarez Demir "
    "Novak Orlov Santos Moreau Okafor Brandt Keller Horvat Suzuki Fischer Larsen Vargas Dubois Costa Weber Singh Zhang",
    "adjective": "blue north old stone west glass iron green upper lower eastern southern grand silver red white",
    "noun": "ferry lighthouse cannery bridge greenhouse warehouse archive laboratory observatory mill quarry depot "
    "library chapel reservoir tunnel garage workshop vineyard orchard theatre museum kiln brewery pier gallery hangar",
    "town": "Lindholm Kessel Varga Brenna Ostrava Calder Marlow Tessin Halden Viborg Drumlin Novara Ketter Wexley",
    "colour": "crimson teal ochre navy ivory olive violet maroon turquoise beige",
    "cargo": "cedar barley copper cotton salt timber wool granite sugar linen",
}
NAMES = {kind: names.split() for kind, names in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class Question:
    """`lead` begins the gold answer, `value` is the part that is scored. `sentence` holds the answer in the document,
    "" for an aggregate."""

    kind: str
    text: str
    lead: str
    value: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Plant:
    """A text to put into the document at a share of its length between 0 and 1."""

    text: str
    place: float


def plants(rng: random.Random, n_each: int = 10) -> tuple[list[Plant], list[Question]]:
    """What is planted in one document, and what is asked about it."""
    things = [f"the {a} {n}" for a in NAMES["adjective"] for n in NAMES["noun"]]
    rng.shuffle(things)
    planted: list[Plant] = []
    asked: list[Question] = []
    for found in (
        _named(rng, things, n_each, "prose", "keeper", _person),
        _named(rng, things, n_each, "code", "access code", _code),
        _named(rng, things, max(1, n_each // 2), "uuid", "serial number", _uuid),
        *(_table(rng, things, place) for place in (0.25, 0.7)),
        *_aggregates(rng, n_each),
    ):
        planted += found[0]
        asked += found[1]
    return planted, asked


_Found = tuple[list[Plant], list[Question]]


def _person(rng: random.Random) -> str:
    return " ".join(rng.choice(NAMES[part]) for part in ("first", "last"))


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2))
    return rng.choice((f"{rng.randint(1000, 9999)}", f"{letters}-{rng.randint(100, 9999)}"))


def _uuid(rng: random.Random) -> str:
    digits = f"{rng.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _named(
    rng: random.Random, things: list[str], n: int, kind: str, asked_for: str, value: Callable[[random.Random], str]
) -> _Found:
    """Sentences that each name one value of one thing, spread over the text."""
    asked = []
    who = "Who" if kind == "prose" else "What"
    for _ in range(n):
        thing, found = things.pop(), value(rng)
        lead = f"The {asked_for} of {thing} is"
        asked.append(Question(kind, f"{who} is the {asked_for} of {thing}?", lead, found, f"{lead} {found}."))
    return _spread(rng, asked), asked


def _spread(rng: random.Random, asked: list[Question]) -> list[Plant]:
    return [Plant(q.sentence, (i + rng.random()) / len(asked)) for i, q in enumerate(asked)]


def _table(rng: random.Random, things: list[str], place: float) -> _Found:
    rows = [
        (things.pop(), rng.choice(NAMES["town"]), f"{rng.randint(11, 99)},{rng.randint(100, 999)}") for _ in range(6)
    ]
    lines = [f"| {thing} | {town} | {rent} euros |" for thing, town, rent in rows]
    text = "\n".join(("| Building | Town | Rent |", "| --- | --- | --- |", *lines))
    asked = []
    for line, (thing, _, rent) in zip(lines[::2], rows[::2], strict=True):
        asked.append(Question("cell", f"What is the rent of {thing}?", f"The rent of {thing} is", rent, line))
    return [Plant(text, place)], asked


def _aggregates(rng: random.Random, n: int) -> list[_Found]:
    """Sentences of which most name the same thing; `n` in each series."""
    return [
        _series(
            rng,
            n,
            NAMES["town"],
            "The inspector went to {} that day.",
            "Which town did the inspector go to most often?",
        ),
        _series(rng, n, NAMES["colour"], "One more reader chose {}.", "Which colour did most readers choose?"),
        _series(rng, n, NAMES["cargo"], "Another train carried {}.", "What did most trains carry?"),
    ]


def _series(rng: random.Random, n: int, names: list[str], sentence: str, question: str) -> _Found:
    most, *others = rng.sample(names, 3)
    said = [most] * (n - n // 2 + 1) + others * n
    said = said[:n]
    rng.shuffle(said)
    planted = [Plant(sentence.format(name), (i + rng.random()) / n) for i, name in enumerate(said)]
    return planted, [Question("aggregate", question, sentence.split(" {")[0], most, "")]
