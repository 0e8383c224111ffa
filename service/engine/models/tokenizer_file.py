"""A model directory's `tokenizer.json`, checked before anything believes it. Needs no torch."""

from pathlib import Path
from typing import Any

from service.engine.models.configs import OBJECT, check_value, read_object, shown
from service.engine.models.errors import SourceRefused

TOKENIZER_NAME = "tokenizer.json"
_MOST_NBYTES = 512 << 20
_MOST_TOKENS = 1 << 26


def read_tokenizer(directory: Path) -> dict[str, Any]:
    """Vocabulary, merges and added tokens are of the form that the tokenizers library gives them. Raises SourceRefused,
    naming the file and what is wrong in it; FileNotFoundError."""
    path = directory / TOKENIZER_NAME
    document = read_object(path, _MOST_NBYTES, flat=True)
    check_value(path, "model", document.get("model"), OBJECT)
    model = document["model"]
    _check(path, "its vocab is no table of tokens", model.get("vocab"), _is_vocab)
    _check(path, "its merges are no pairs of tokens", model.get("merges") or [], _are_merges)
    _check(path, "its added_tokens are no tokens with an id", document.get("added_tokens") or [], _are_added)
    return document


def _check(path: Path, wrong: str, value: Any, fits: Any) -> None:
    if not fits(value):
        raise SourceRefused(f"{path} cannot be read as a tokenizer: {wrong} ({shown(value)})")


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_TOKENS


def _is_vocab(value: Any) -> bool:
    """Ids by piece, or pairs of piece and score in the order of ids."""
    if isinstance(value, dict):
        return all(map(_is_id, value.values()))
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    )


def _are_merges(value: Any) -> bool:
    """Files of different ages write a merge as one text or as two."""
    return isinstance(value, list) and all(
        isinstance(merge, str) or (isinstance(merge, list) and all(isinstance(part, str) for part in merge))
        for merge in value
    )


def _are_added(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and _is_id(one.get("id")) and isinstance(one.get("content"), str) for one in value
    )
