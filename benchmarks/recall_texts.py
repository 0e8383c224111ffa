"""Documents for `recall.py`: public text that comes with every Python, and facts to plant in it.

Text, things, people and wordings are others than those by which index heads are found.
"""

import inspect
import pkgutil
import random
import re
from dataclasses import dataclass
from importlib import import_module
from pydoc_data import topics

TOPICS = (
    ("specialnames",), ("compound",), ("types",), ("formatstrings", "strings"), ("string-methods", "import"),
    ("typesseq", "comparisons"), ("debugger", "try"), ("attribute-access", "customization", "calls"),
)  # fmt: skip
"""Chapters of the language reference, a document each."""
PACKAGES = ("argparse", "unittest", "email", "logging")
"""Packages whose docstrings are a document each."""
PLACES = ("harbour", "mill", "orchard", "quarry", "chapel", "station", "lighthouse", "ferry", "market", "abbey",
          "tannery", "brewery")  # fmt: skip
ROOMS = ("archive", "boiler house", "cellar", "pump room", "gallery", "workshop", "grain store", "laboratory",
         "reading room", "garage", "cold room", "print shop")  # fmt: skip
FIRST = ("Agnes", "Bruno", "Clara", "Dario", "Edith", "Felix", "Greta", "Hugo", "Ingrid", "Jonas", "Katrin", "Lars",
         "Mirela", "Nils", "Olga", "Piotr", "Ramona", "Simon", "Tilda", "Ulrich", "Vera", "Walter", "Yusuf",
         "Zofia")  # fmt: skip
LAST = ("Abelson", "Bertrand", "Castellan", "Dorsey", "Eklund", "Fontaine", "Gruber", "Hollis", "Ibarra", "Janssen",
        "Kowal", "Lindqvist", "Marchetti", "Novak", "Okafor", "Pelletier", "Quist", "Rasmussen", "Sorley", "Tanaka",
        "Urban", "Vasquez", "Wendt", "Yates")  # fmt: skip


@dataclass(frozen=True)
class Wording:
    """A sentence and two questions about it; `what` says how far they are from each other."""

    name: str
    what: str
    sentence: str
    questions: tuple[str, str]


KEEPER = "The keeper of {x} is {name}, and its access code is {code}."
SPRING = "Since spring {name} has been responsible for {x}; the door accepts {code}."
WORDINGS = (
    Wording("same words", "the question in the words of the sentence", KEEPER,
            ("Who is the keeper of {x}?", "What is the access code of {x}?")),
    Wording("other question", "the question in other words", KEEPER,
            ("Who looks after {x}?", "Which number do I type to get into {x}?")),
    Wording("other words", "sentence and question in other words", SPRING,
            ("Who is in charge of {x}?", "How can I open {x}?")),
    Wording("far", "what is asked is said in passing",
            "Every morning {x} is unlocked by {name}, who hangs the spare key on hook {code}.",
            ("Whom must I ask to let me in at {x}?", "Where will I find a second key to {x}?")),
    Wording("renamed", "the thing has another name in the question", SPRING,
            ("Who takes care of {y}?", "Which number do I need for {y}?")),
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    wording: str
    sentence: str
    questions: tuple[str, str]
    answers: tuple[str, str]


def facts(n: int, seed: int = 1) -> list[Fact]:
    """`n` facts about different things, the wordings in turn."""
    rng = random.Random(seed)
    things = [(place, room) for place in PLACES for room in ROOMS]
    rng.shuffle(things)
    return [_fact(things[i], WORDINGS[i % len(WORDINGS)], rng) for i in range(n)]


def _fact(thing: tuple[str, str], wording: Wording, rng: random.Random) -> Fact:
    place, room = thing
    name = f"{rng.choice(FIRST)} {rng.choice(LAST)}"
    code = f"{rng.choice('ABCDEFGHKLMNPRSTUVWXYZ')}{rng.randint(1, 9)}-{rng.randint(1000, 9999)}"
    values = {"x": f"the {place} {room}", "y": f"the {room} at the {place}", "name": name, "code": code}
    sentence = wording.sentence.format(**values)
    who, which = (question.format(**values) for question in wording.questions)
    return Fact(wording.name, sentence[0].upper() + sentence[1:], (who, which), (name, code))


def texts() -> list[str]:
    """The documents, at least 25,000 characters each."""
    chapters = ["\n\n".join(topics.topics[topic] for topic in together) for together in TOPICS]
    return chapters + [docstrings(package) for package in PACKAGES]


def docstrings(package: str) -> str:
    """The docstrings of a package of the standard library, as they stand in it."""
    module = import_module(package)
    modules = [module]
    for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
        if not found.name.startswith("_"):
            modules.append(import_module(f"{package}.{found.name}"))
    documented = [thing for m in modules for thing in _documented(m)]
    return "\n\n".join(text for thing in documented if (text := inspect.getdoc(thing)))


def _documented(module: object) -> list[object]:
    own = [v for v in vars(module).values() if getattr(v, "__module__", "") == getattr(module, "__name__", None)]
    classes = [v for v in own if inspect.isclass(v)]
    methods = [m for c in classes for m in vars(c).values() if inspect.isfunction(m)]
    return [module, *own, *methods]


def planted(text: str, chosen: list[Fact], first: int, last: int) -> tuple[str, list[tuple[int, int]]]:
    """The text with the facts at equal distances in its characters [first, last), each behind the end of a sentence or
    line, and where each of them begins and ends (characters)."""
    ends = [match.end() for match in re.finditer(r"[.:]\s+", text[:last]) if match.end() >= first]
    out, where, done = "", [], 0
    for number, fact in enumerate(chosen):
        wanted = first + (last - first) * (number + 0.5) / len(chosen)
        place = min(ends, key=lambda end, wanted=wanted: abs(end - wanted))
        out += text[done:place]
        where.append((len(out), len(out) + len(fact.sentence)))
        out += fact.sentence + " "
        done = place
    return out + text[done:], where
