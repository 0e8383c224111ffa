"""How much of a known text came out: word by word, in order."""

import re
import unicodedata
from dataclasses import dataclass
from difflib import SequenceMatcher

_WORD = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W_\u3040-\u30ff\u4e00-\u9fff]+")


@dataclass(frozen=True)
class Score:
    """Counts of words; those `in_order` stand in both texts in the same order."""

    n_truth: int
    n_found: int
    in_order: int

    @property
    def recall(self) -> float:
        """The share of the known words that came out."""
        return self.in_order / max(1, self.n_truth)

    @property
    def precision(self) -> float:
        """The share of the words that came out which are known."""
        return self.in_order / max(1, self.n_found)

    @property
    def accuracy(self) -> float:
        """Both at once; a word in the wrong place is missing once and too much once."""
        return 2 * self.in_order / max(1, self.n_truth + self.n_found)


def words(text: str) -> list[str]:
    """Runs of letters and digits in lower case, without marks; a character of Chinese or Japanese is a word."""
    return _WORD.findall(unicodedata.normalize("NFC", text).lower())


def score(truth: str, found: str) -> Score:
    known, seen = words(truth), words(found)
    blocks = SequenceMatcher(a=known, b=seen, autojunk=False).get_matching_blocks()
    return Score(len(known), len(seen), sum(block.size for block in blocks))
