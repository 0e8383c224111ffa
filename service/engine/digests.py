"""Names of exact token sequences, the same in every process."""

from collections.abc import Sequence

import numpy as np

from cache_store.fingerprint import token_digest


def digest_of(token_ids: Sequence[int]) -> str:
    """`cache_store.token_digest` of plain integers."""
    return token_digest(np.asarray(token_ids, dtype="<i4").tobytes())


def chain_digest(document_digest: str, chain: Sequence[int]) -> str:
    """Names all tokens before a turn: those of the document, then those of the earlier turns."""
    return digest_of([*document_digest.encode(), *chain])
