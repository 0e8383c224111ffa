"""Invented facts to plant in any English text, and questions about them that use their words or others."""

import random
from dataclasses import dataclass

_THINGS = (
    "the bicycle ferry", "the botanic garden", "the clock museum", "the drying hall", "the east reservoir",
    "the fish ladder", "the glass furnace", "the hay auction", "the ice rink", "the jam kitchen", "the kite school",
    "the lace exhibition", "the mobile dentist", "the night nursery", "the old granary", "the paper press",
    "the quarantine stable", "the rope walk", "the seed bank", "the toy hospital", "the upper sluice",
    "the vaccine depot", "the wind tunnel", "the yarn fair", "the amber collection", "the barrel store",
    "the children's choir", "the diving tower", "the egg sorting machine", "the flax mill", "the gravel barge",
    "the herb cellar", "the insect house", "the judo club", "the kelp farm", "the lamp factory", "the map room",
    "the needle shop", "the oyster bed", "the piano archive", "the rain gauge", "the salt warehouse",
    "the tram depot", "the violin workshop", "the water bus", "the apple store", "the beacon on the hill",
    "the cable winch",
)  # fmt: skip
_FIRST = ("Albin", "Berit", "Cosima", "Dragan", "Elif", "Fergus", "Gudrun", "Hamid", "Imre", "Jolanta", "Kenji",
          "Ludmila", "Matteo", "Noemi", "Orsolya", "Pascal", "Rosalind", "Sverre", "Tamsin", "Wendelin")  # fmt: skip
_LAST = ("Aldous", "Brennan", "Czerny", "Duval", "Engstrom", "Falk", "Gossage", "Hruska", "Ingram", "Jepsen", "Kestrel",
         "Lombard", "Mercier", "Nyberg", "Osgood", "Pryce", "Rademaker", "Salvin", "Thorpe", "Winslow")  # fmt: skip
_LETTERS = "BCDFGHJKLMNPRSTVWXZ"
_CAUSES = ("a burnt cable", "mice in the walls", "a broken valve", "frost in the pipes", "a wrong delivery")
_MONTHS = ("January", "March", "April", "June", "August", "October", "November")

_WORDINGS: tuple[tuple[str, str, str], ...] = (
    ("The warden of {x} is {name}, and its register number is {code}.",
     "Who is the warden of {x}?", "What is the register number of {x}?"),
    ("The warden of {x} is {name}, and its register number is {code}.",
     "Who looks after {x}?", "Under which number is {x} filed?"),
    ("In {month} the council gave {name} charge of {x} and put {money} pounds aside for it.",
     "Who runs {x} now?", "How much money is reserved for {x}?"),
    ("Anyone who wants to use {x} should write to {name}, quoting {code}.",
     "Whom do I contact about {x}?", "Which reference must a letter about {x} carry?"),
    ("To start {x}, {name} types {code} on the panel.",
     "Who operates {x}?", "What has to be entered to switch {x} on?"),
    ("It was {name} who closed {x} after {cause} on {day} {month}.",
     "Why was {x} shut?", "When did {x} have to stop?"),
)  # fmt: skip
N_WORDINGS = len(_WORDINGS)


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence, and questions that only it answers."""

    sentence: str
    questions: tuple[str, str]


def make_facts(n: int, part: int) -> list[Fact]:
    """`n` facts, each about another thing, the same ones every time. Those of part 0 and part 1 share no thing, as long
    as there are at most 24 of each."""
    things = _THINGS[part::2]
    if n > len(things):
        raise ValueError(f"there are {len(things)} facts in a part, not {n}")
    random_ = random.Random(part)  # noqa: S311 - invented names, no secrets
    return [_fact(things[i], i, random_) for i in range(n)]


def _fact(thing: str, number: int, random_: random.Random) -> Fact:
    values = {
        "x": thing,
        "name": f"{random_.choice(_FIRST)} {random_.choice(_LAST)}",
        "code": "".join(random_.choices(_LETTERS, k=2)) + f"-{random_.randint(100, 999)}",
        "money": f"{random_.randint(11, 99)},{random_.randint(1, 9)}00",
        "cause": random_.choice(_CAUSES),
        "day": str(random_.randint(2, 29)),
        "month": random_.choice(_MONTHS),
    }
    sentence, *questions = (text.format(**values) for text in _WORDINGS[number % N_WORDINGS])
    first, second = questions
    return Fact(sentence[0].upper() + sentence[1:], (first, second))


def plant(text: str, facts: list[Fact]) -> tuple[str, list[tuple[int, int]]]:
    """The text with the facts at equal distances, each behind the end of a sentence, and where each of them begins and
    ends in it (characters)."""
    ends = [i + 2 for i in range(len(text) - 2) if text[i : i + 2] in (". ", ".\n")]
    places = [min(ends, key=lambda end: abs(end - len(text) * (n + 0.5) / len(facts))) for n in range(len(facts))]
    planted, where, done = "", [], 0
    for place, fact in zip(places, facts, strict=True):
        planted += text[done:place]
        where.append((len(planted), len(planted) + len(fact.sentence)))
        planted += fact.sentence + " "
        done = place
    return planted + text[done:], where
