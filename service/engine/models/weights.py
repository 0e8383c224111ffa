"""Identity of a model's files: the tensors in its safetensors files and its configuration. Needs no torch."""

import hashlib
import json
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from service.engine.models.errors import ModelDamaged

GGUF_NAME = "model.gguf"
"""In a model directory whose weights are kept as a GGUF: that file."""
_CHUNK_NBYTES = 8 << 20
_MAX_HEADER_NBYTES = 100 << 20
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Of an element, of the dtypes that the format has."""

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


def tensor_spans(model_dir: Path, files: Sequence[Path] | None = None) -> list[TensorSpan]:
    """Every tensor of a directory's safetensors files, or of those in `files`, by name.

    The format: 8 bytes little-endian header length, a JSON header, the bytes. Raises ModelDamaged for a file that the
    safetensors library would not read: cut short, or with a header that does not describe its bytes.
    """
    paths = sorted(model_dir.glob("*.safetensors")) if files is None else files
    spans = [span for path in paths for span in _file_spans(path)]
    if len({s.name for s in spans}) != len(spans):
        raise ModelDamaged(f"{model_dir} holds a tensor twice: files of two models lie together")
    return sorted(spans, key=lambda s: s.name)


def _file_spans(path: Path) -> list[TensorSpan]:
    with path.open("rb") as file:
        length, nbytes = int.from_bytes(file.read(8), "little"), path.stat().st_size
        if not 2 <= length <= min(_MAX_HEADER_NBYTES, nbytes):
            raise ModelDamaged(f"{path} is not a safetensors file, or was cut off in its header")
        header = _header(path, file.read(length))
    header.pop("__metadata__", None)
    spans = [_span(path, 8 + length, name, entry) for name, entry in header.items()]
    _check_offsets(path, 8 + length, nbytes, spans)
    return spans


def _header(path: Path, data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ModelDamaged(f"{path} has a damaged header: {error}") from None
    if not isinstance(header, dict):
        raise ModelDamaged(f"{path} has a damaged header: it is not a JSON object")
    return header


def _span(path: Path, begin: int, name: str, entry: Any) -> TensorSpan:
    found: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype: Any = found.get("dtype")
    shape: Any = found.get("shape")
    offsets: Any = found.get("data_offsets")
    known = isinstance(dtype, str) and dtype in _BITS
    if not (known and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise ModelDamaged(
            f"{path} has a damaged header: dtype, shape and data_offsets of {name[:100]} are {reprlib.repr(dtype)}, "
            f"{reprlib.repr(shape)} and {reprlib.repr(offsets)}"
        )
    first, last = offsets
    if 8 * (last - first) != _BITS[dtype] * prod(shape):
        raise ModelDamaged(f"{path} has a damaged header: {name[:100]} has {last - first} bytes for {dtype} {shape}")
    return TensorSpan(name, dtype, tuple(shape), path, begin + first, begin + last)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_offsets(path: Path, begin: int, nbytes: int, spans: list[TensorSpan]) -> None:
    """One tensor follows the other, to the end of the file."""
    end = begin
    for span in sorted(spans, key=lambda s: (s.first, s.last)):
        if span.first != end:
            raise ModelDamaged(f"{path} has a damaged header: {span.name[:100]} does not follow the tensor before it")
        end = span.last
    if end > nbytes:
        raise ModelDamaged(f"{path} is cut off: {end - nbytes:,} of its {end:,} bytes are missing; copy it again")
    if end < nbytes:
        raise ModelDamaged(f"{path} has {nbytes - end:,} bytes behind its last tensor: it is no whole safetensors file")


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
