"""Where sentences begin in a document's tokens, so that what is fetched ends where a thought does."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_ENDS = (".", "!", "?", "…")
_ENDS_WITHOUT_SPACE = ("。", "！", "？")
_CLOSING = "\"'”’»)]*_`"


Starts = npt.NDArray[np.int64]


def starts_finder(decoder: object) -> Callable[[npt.NDArray[np.integer]], Starts]:
    """`sentence_starts` with the texts of a tokenizer's tokens. One that cannot tell their bytes gives no starts."""
    token_bytes: Callable[[int], bytes] | None = getattr(decoder, "token_bytes", None)
    if token_bytes is None or not getattr(decoder, "understood", True):
        return lambda token_ids: np.empty(0, np.int64)
    return lambda token_ids: sentence_starts(token_ids, lambda token: token_bytes(token).decode("utf-8", "replace"))


def sentence_starts(token_ids: npt.NDArray[np.integer], text_of: Callable[[int], str]) -> Starts:
    """The places of tokens that begin a sentence or a paragraph, in order; the first token is one.

    `text_of` gives a token's text with the spaces that belong to it. A sentence ends with a full stop, a question or
    exclamation mark (and what closes a quotation or bracket) before white space, a paragraph with an empty line. An
    abbreviation can look like an end: that only makes a shorter sentence.
    """
    ids, of_token = np.unique(token_ids, return_inverse=True)
    features = np.array([_features(text_of(int(token))) for token in ids], np.int64).reshape(-1, 5)
    blank, ends, lines_before, lines_behind, spaces = features[of_token].T
    places = np.arange(len(token_ids))
    said = np.flatnonzero(blank == 0)
    if not len(said):
        return places[:1]
    lines = np.cumsum(np.where(blank == 1, lines_before, 0))
    before, here = said[:-1], said[1:]
    new_lines = lines_behind[before] + lines[here] - lines[before] + lines_before[here]
    spaced = (here - before > 1) | (spaces[before] & 2 > 0) | (spaces[here] & 1 > 0)
    starts = here[(new_lines > 1) | (ends[before] == 2) | ((ends[before] == 1) & spaced)]
    return np.unique(np.concatenate((places[:1], said[:1], starts)))


def _features(text: str) -> tuple[int, int, int, int, int]:
    """Whether it is blank; whether it ends a sentence, 2 where no space must follow; line ends before and behind its
    words, all of them before for a blank one; spaces: 1 before, 2 behind."""
    words = text.strip()
    if not words:
        return 1, 0, text.count("\n"), 0, 0
    before, behind = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    end = words.rstrip(_CLOSING) or words
    ends = 2 if end.endswith(_ENDS_WITHOUT_SPACE) else int(end.endswith(_ENDS))
    return 0, ends, before.count("\n"), behind.count("\n"), (1 if before else 0) + (2 if behind else 0)
