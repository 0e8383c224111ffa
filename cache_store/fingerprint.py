"""What must agree before a snapshot is used: model, KV type, numerics; each compared by itself."""

import hashlib
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of the computation that made a KV cache.

    Each field is a short content digest or version string, never a path, a display name or a size of free
    memory. Model identity: `weights`, `quantization`, `tokenizer`, `template`, `rope`. KV type: `kv`.
    Numerics: `engine`, `compute_dtype`, `chunking`.
    """

    weights: str
    quantization: str
    tokenizer: str
    template: str
    rope: str
    kv: str
    engine: str
    compute_dtype: str
    chunking: str

    @property
    def digest(self) -> str:
        """16 hex digits over all fields, each tagged by its name; a directory name, never a proof."""
        text = "\x1f".join(f"{key}={value}" for key, value in asdict(self).items())
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def differences(self, other: "Fingerprint") -> tuple[str, ...]:
        """Names of the fields that differ."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))


def token_digest(token_ids: "bytes") -> str:
    """Digest of token ids, given as little-endian int32 bytes: the same in every process."""
    return hashlib.blake2b(token_ids, digest_size=16).hexdigest()
