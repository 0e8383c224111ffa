"""Background text of the fidelity harness: English prose that is on every machine with Python and this repository.

Documentation strings of the standard library (PSF licence) and the project's own pages, as paragraphs. Another version
of Python has slightly other texts, so documents are told apart by their digest.
"""

import importlib
import inspect
import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
MODULES = {
    "language": "ast bdb codecs doctest inspect pdb pickletools typing unittest.mock",
    "tools": "argparse asyncio calendar cmd collections configparser csv datetime decimal difflib functools heapq",
    "more tools": "itertools locale logging optparse pathlib random shutil sqlite3 statistics subprocess tempfile",
    "still more": "email.message http.client textwrap threading urllib.request zipfile",
}
_SHORTEST, _LONGEST = 160, 900
_NOT_PROSE = re.compile(r">>>|^\s*[-+*|#]|```|\\x", re.MULTILINE)


def paragraphs(seed: int) -> list[str]:
    """All paragraphs, each once, in an order of its own for every seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.11 gives one for a look at `typing.io`
        found = list(dict.fromkeys(_tidy(p) for p in (*_docstrings(), *_pages()) if _is_prose(p)))
    random.Random(seed).shuffle(found)
    return found


def _docstrings() -> Iterator[str]:
    for name in " ".join(MODULES.values()).split():
        module = importlib.import_module(name)
        for thing in _documented(module):
            yield from (inspect.getdoc(thing) or "").split("\n\n")


def _documented(module: ModuleType) -> Iterator[object]:
    yield module
    for _, thing in sorted(vars(module).items()):
        if inspect.isclass(thing) or inspect.isfunction(thing):
            yield thing
        if inspect.isclass(thing):
            yield from (member for _, member in sorted(vars(thing).items()) if inspect.isfunction(member))


def _pages() -> Iterator[str]:
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]):
        if path.name != "fidelity.md":  # written by this harness
            yield from path.read_text(encoding="utf-8").split("\n\n")


def _is_prose(paragraph: str) -> bool:
    letters = sum(c.isalpha() or c.isspace() for c in paragraph)
    fits = _SHORTEST <= len(paragraph) <= _LONGEST
    return fits and letters > 0.85 * len(paragraph) and not _NOT_PROSE.search(paragraph)


def _tidy(paragraph: str) -> str:
    return re.sub(r"\s+", " ", paragraph).strip()
