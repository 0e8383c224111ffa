"""Token ids to text as they come, in whole characters.

The window method of text-generation-inference and vLLM: decode from a little before the new token, so that a
decoder which treats the start of a text differently (SentencePiece drops a space) gives what decoding all at
once gives.
"""

import codecs
from typing import Protocol

REPLACEMENT = "\ufffd"
HELD = 3
"""Trailing U+FFFD that may still become a character: a decoder with byte fallback shows one for each byte."""
WINDOW = 32
"""A window longer than this is moved on, though it ends in U+FFFD: no character has that many tokens."""


class Decoder(Protocol):
    """A tokenizer, as far as it is needed here. With `token_bytes(id) -> bytes` beside it, a U+FFFD that the
    answer really ends with is told from half a character."""

    def decode(self, ids: list[int]) -> str: ...


class Detokenizer:
    """Text of one answer. Its pieces joined are the decoded answer, without a cut last character."""

    def __init__(self, decoder: Decoder) -> None:
        self._decode = decoder.decode
        self._bytes = getattr(decoder, "token_bytes", None) if getattr(decoder, "understood", True) else None
        self._ids: list[int] = []
        self._read = 0
        self._emitted = 0

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completed, often none."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        stable = len(text) - _n_trailing(text)
        piece = text[self._emitted : stable]
        self._emitted = max(self._emitted, stable)
        if piece and stable == len(text):
            self._move(self._read)
        elif len(self._ids) > WINDOW:
            self._move(len(self._ids) - HELD - 1)
        return piece

    def finish(self) -> str:
        """What is left at the end of the answer, a cut character dropped."""
        text = self._decode(self._ids) if self._ids else ""
        end = len(text) - _n_trailing(text)
        if self._bytes is not None and _ends_whole(b"".join(map(self._bytes, self._ids))):
            end = len(text)
        piece = text[self._emitted : end]
        self._emitted = end
        return piece

    def _move(self, first: int) -> None:
        """Let the window begin at token `first` of it."""
        self._ids = self._ids[first:]
        self._read = len(self._ids)
        text = self._decode(self._ids)
        self._emitted = len(text) - _n_trailing(text)


def _n_trailing(text: str) -> int:
    """How many U+FFFD the text ends with, as far as they may be held back."""
    n = 0
    while n < HELD and text[-1 - n : len(text) - n] == REPLACEMENT:
        n += 1
    return n


def _ends_whole(data: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return not decoder.getstate()[0]
