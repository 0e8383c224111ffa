"""Imported models on disk: ``<models_dir>/<name>/``; found by name or by path."""

import re
from pathlib import Path

from service.engine.models.card import CARD_NAME, ModelCard, load_card
from service.engine.models.errors import ModelError, ModelNotFound, SourceRefused

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> str:
    """The name itself, if it can be a directory name here. Raises SourceRefused."""
    if not _NAME.fullmatch(name):
        raise SourceRefused(
            f"{name!r} cannot name a model: use up to 64 of A-Z a-z 0-9 . _ - and start with one of the first"
        )
    return name


def find_model(name_or_path: str, models_dir: Path) -> Path:
    """The directory of a model: `name_or_path` inside `models_dir`, else as a path. Raises ModelNotFound."""
    for candidate in (models_dir / name_or_path, Path(name_or_path)):
        if (candidate / CARD_NAME).is_file():
            return candidate.resolve()
    known = ", ".join(_names(models_dir)) or "none"
    raise ModelNotFound(
        f"no model {name_or_path!r}: neither a model directory nor a name in {models_dir} (imported there: {known})"
    )


def list_models(models_dir: Path) -> list[tuple[Path, ModelCard | ModelError]]:
    """Every model in `models_dir` by name, with its card or with what is wrong with it."""
    return [(models_dir / name, _card_or_error(models_dir / name)) for name in _names(models_dir)]


def _names(models_dir: Path) -> list[str]:
    if not models_dir.is_dir():
        return []
    return sorted(p.name for p in models_dir.iterdir() if _NAME.fullmatch(p.name) and (p / CARD_NAME).is_file())


def _card_or_error(model_dir: Path) -> ModelCard | ModelError:
    try:
        return load_card(model_dir)
    except ModelError as error:
        return error
