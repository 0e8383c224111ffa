"""A tokenizer without a model, for tests and dry runs: UTF-8 bytes, and one id per control string."""

import re
from collections.abc import Sequence

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_SPECIAL = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")")
_N_BYTES = 256


class ByteTokenizer:
    """Implements `ingest.tokenize.Tokenizer`: ids 0-255 are bytes, 256 and up the `SPECIAL_TOKENS`."""

    vocab_size = _N_BYTES + len(SPECIAL_TOKENS)

    def encode_plain(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_template(self, text: str) -> list[int]:
        parts = _SPECIAL.split(text)
        return [
            token
            for part in parts
            for token in ([_N_BYTES + SPECIAL_TOKENS.index(part)] if part in SPECIAL_TOKENS else part.encode())
        ]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, control strings spelled out; broken UTF-8 becomes U+FFFD."""
        pieces = [
            bytes([token]) if token < _N_BYTES else SPECIAL_TOKENS[token - _N_BYTES].encode() for token in token_ids
        ]
        return b"".join(pieces).decode(errors="replace")
