"""The bundled texts: what weights are calibrated on, and what they are checked on afterwards.

`*.txt`: prose in several languages, one file each. `held_out.txt`: what no model is calibrated on, texts separated by
lines of `%`. Beside them made-up numbers, this program's own source as code, and where exllamav2 is installed with its
own texts those too.
"""

from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

from service.engine.models.convert.numbers import made_up_texts
from service.engine.models.gate import gate_text

HELD_OUT = "held_out.txt"
_CODE = (("service", "core"), ("service", "web", "static"), ("ingest", "formats"), ("service", "engine", "scheduler"))
"""Read as files: nothing of these packages is imported."""
_CODE_SUFFIXES = (".py", ".js", ".css")
_CODE_CHARACTERS = 40_000
"""Of each place."""
_PIECE_CHARACTERS = 1500
_THEIRS = ("multilingual.utf8", "technical.utf8", "wiki.utf8", "tiny.utf8")
_THEIR_CHARACTERS = 160_000


def bundled_texts() -> Iterator[str]:
    """The mix, kinds and languages in turn; the same for one version of this program."""
    kinds = [*_languages(), made_up_texts(), _pieces(_code()), *_theirs()]
    for turn in zip_longest(*kinds):
        yield from (text for text in turn if text is not None)


def held_out_texts() -> list[str]:
    """Texts that weights are checked on: the English one of the KV gate in parts, and one of each of some languages."""
    return [*_pieces(gate_text()), *(text.strip() for text in _read(HELD_OUT).split("\n%\n"))]


def _languages() -> list[list[str]]:
    directory = files(__name__)
    names = sorted(entry.name for entry in directory.iterdir() if entry.name.endswith(".txt"))
    return [_pieces(_read(name)) for name in names if name != HELD_OUT]


def _theirs() -> list[list[str]]:
    """Texts that exllamav2 brings, as far as they are there."""
    spec = find_spec("exllamav2")
    if spec is None or not spec.submodule_search_locations:
        return []
    directory = Path(spec.submodule_search_locations[0]) / "conversion" / "standard_cal_data"
    paths = [directory / name for name in _THEIRS if (directory / name).is_file()]
    return [_pieces(path.read_text("utf-8")[:_THEIR_CHARACTERS]) for path in paths]


def _read(name: str) -> str:
    return files(__name__).joinpath(name).read_text("utf-8")


def _pieces(text: str) -> list[str]:
    """Paragraphs together until they are long enough."""
    found, kept = [], ""
    for paragraph in text.strip().split("\n\n"):
        kept += paragraph + "\n\n"
        if len(kept) >= _PIECE_CHARACTERS:
            found.append(kept)
            kept = ""
    return [*found, kept] if kept else found


def _code() -> str:
    """Sources of each place, one after another."""
    sources = []
    for package, *below in _CODE:
        entries = sorted(files(package).joinpath(*below).iterdir(), key=lambda entry: entry.name)
        texts = [entry.read_text("utf-8") for entry in entries if _is_ours(entry.name)]
        sources.append("\n\n".join(texts)[:_CODE_CHARACTERS])
    return "\n\n".join(sources)


def _is_ours(name: str) -> bool:
    return name.endswith(_CODE_SUFFIXES) and not name.endswith(".min.js")
