"""Identity of a model's files: the tensors in its safetensors files and its configuration. Needs no torch."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.engine.models.errors import ModelDamaged

GGUF_NAME = "model.gguf"
"""In a model directory whose weights are kept as a GGUF: that file."""
_CHUNK_NBYTES = 8 << 20
_MAX_HEADER_NBYTES = 100 << 20

_NOT_COMPUTATION = frozenset(
    [
        "_name_or_path",
        "_model_name_or_path",
        "_from_model_config",
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    ]
)
"""Keys of `config.json` that name things, tell how it is stored, train it, or are hashed apart (RoPE)."""


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where one tensor lies: bytes [first, last) of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return self.last - self.first


def tensor_spans(model_dir: Path) -> list[TensorSpan]:
    """Every tensor of a directory's safetensors files, by name.

    The format: 8 bytes little-endian header length, a JSON header, the bytes. Raises ModelDamaged.
    """
    spans = [span for path in sorted(model_dir.glob("*.safetensors")) for span in _file_spans(path)]
    if len({s.name for s in spans}) != len(spans):
        raise ModelDamaged(f"{model_dir} holds a tensor twice: files of two models lie together")
    return sorted(spans, key=lambda s: s.name)


def _file_spans(path: Path) -> Iterator[TensorSpan]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_NBYTES, path.stat().st_size):
            raise ModelDamaged(f"{path} is not a safetensors file")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ModelDamaged(f"{path} has a damaged header: {error}") from error
    header.pop("__metadata__", None)
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        yield TensorSpan(name, entry["dtype"], tuple(entry["shape"]), path, 8 + length + first, 8 + length + last)


def weights_digest(model_dir: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> str:
    """32 hex digits over names, dtypes, shapes and bytes of all tensors, independent of the split into files; over all
    of a GGUF, which says too how its tensors are computed with.

    `progress` is told bytes done and in total. Raises ModelDamaged when a file is cut short.
    """
    path = model_dir / GGUF_NAME
    kept = path.is_file()
    spans = [TensorSpan(GGUF_NAME, "", (), path, 0, path.stat().st_size)] if kept else tensor_spans(model_dir)
    total, done = sum(s.nbytes for s in spans), 0
    digest = hashlib.blake2b(digest_size=16)
    for span in spans:
        digest.update(json.dumps([span.name, span.dtype, span.shape, span.nbytes]).encode())
        for chunk in _chunks(span):
            digest.update(chunk)
            done += len(chunk)
            progress(done, total)
    return digest.hexdigest()


def _chunks(span: TensorSpan) -> Iterator[bytes]:
    with span.path.open("rb") as file:
        file.seek(span.first)
        left = span.nbytes
        while left:
            chunk = file.read(min(left, _CHUNK_NBYTES))
            if not chunk:
                raise ModelDamaged(f"{span.path} ends inside the tensor {span.name}")
            left -= len(chunk)
            yield chunk


def config_digest(config: dict[str, Any]) -> str:
    """32 hex digits over the keys of a `config.json` that decide what is computed, RoPE left out."""
    kept = {key: value for key, value in config.items() if key not in _NOT_COMPUTATION}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()
