"""Text to token ids and back. Used by the API process, so it imports neither torch nor transformers.

Two readings of a text exist. *Plain* reading never makes a control token, whatever the text says: documents
and questions are read so. *Template* reading makes them: the fixed parts of the prompt are read so.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class PlainEncoding:
    """Ids of a plain text, and for each id the offset (in characters) where its text begins."""

    ids: list[int]
    starts: list[int]


def tokenizer_digest(tokenizer_json: bytes) -> str:
    """Identity of a tokenizer: 32 hex digits over the bytes of its `tokenizer.json`."""
    return hashlib.blake2b(tokenizer_json, digest_size=16).hexdigest()


class Tokenizer:
    """A model's tokenizer. Immutable after loading; any number of threads may call it at once."""

    def __init__(self, tokenizer_json: bytes) -> None:
        document = json.loads(tokenizer_json)
        added = document.get("added_tokens", [])
        self.digest = tokenizer_digest(tokenizer_json)
        self.control_ids = frozenset(t["id"] for t in added if t["content"].strip())
        self._hidden_ids = frozenset(t["id"] for t in added if t["special"])
        self._added_text = {t["id"]: t["content"] for t in added}
        self._decoders = _decoder_types(document.get("decoder"))
        self._template = _quiet(tokenizers.Tokenizer.from_str(tokenizer_json.decode()))
        self._plain = _quiet(tokenizers.Tokenizer.from_str(json.dumps(_all_special(document))))
        self._plain.encode_special_tokens = True
        self.vocab_size = self._template.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Read a model directory's `tokenizer.json`. Raises OSError, or ValueError if it is no tokenizer."""
        data = (model_dir / "tokenizer.json").read_bytes()
        try:
            return cls(data)
        except ValueError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ValueError(f"{model_dir / 'tokenizer.json'} is not a tokenizer: {error}") from error

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token: `<|im_end|>` is ten characters."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_plain_offsets(self, text: str) -> PlainEncoding:
        """`encode_plain`, with the character offset where each id begins (to know the page of a token)."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        return PlainEncoding(encoding.ids, [start for start, _ in encoding.offsets])

    def encode_template(self, text: str) -> list[int]:
        """Ids of a fixed part of the prompt, control tokens read as such. Never for text from outside."""
        return self._template.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, keep_control: bool = False) -> str:
        """Text of `ids`. Special tokens have no text unless `keep_control`; half a character gives U+FFFD."""
        return self._template.decode(list(ids), skip_special_tokens=not keep_control)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes one token adds to a text, b"" for a special or unknown one.

        The bytes of several tokens joined are those of their text, but that a SentencePiece text begins with
        a space which `decode` drops.
        """
        return self._bytes_of.get(token_id, b"")

    @property
    def understood(self) -> bool:
        """Whether `token_bytes` knows how this tokenizer's decoder joins tokens."""
        return "ByteLevel" in self._decoders or "ByteFallback" in self._decoders

    @cached_property
    def _bytes_of(self) -> dict[int, bytes]:
        convert = _byte_level_bytes if "ByteLevel" in self._decoders else _sentencepiece_bytes
        pieces = {i: convert(piece) for piece, i in self._template.get_vocab(with_added_tokens=False).items()}
        pieces |= {i: text.encode() for i, text in self._added_text.items()}
        return {i: piece for i, piece in pieces.items() if i not in self._hidden_ids}


def _quiet(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A model's saved truncation would silently cut documents."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _all_special(document: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer with every added token marked special (`<think>` often is not), blanks left out."""
    added = [t | {"special": t["special"] or bool(t["content"].strip())} for t in document.get("added_tokens", [])]
    return document | {"added_tokens": added}


def _decoder_types(decoder: dict[str, Any] | None) -> frozenset[str]:
    if decoder is None:
        return frozenset()
    return frozenset([decoder["type"]]).union(*(_decoder_types(d) for d in decoder.get("decoders", [])))


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    if all(c in _ALPHABET for c in piece):
        return bytes(_ALPHABET[c] for c in piece)
    return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    fallback = _BYTE_FALLBACK.fullmatch(piece)
    return bytes([int(fallback[1], 16)]) if fallback else piece.replace("▁", " ").encode()
