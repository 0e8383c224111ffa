"""Merge a LoRA adapter into a GGUF: the weights that it changes are stored anew as Q8_0, all others as they are."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from service.engine.models.errors import AdapterRefused
from service.engine.models.gguf_header import open_gguf
from service.engine.models.lora import LowRank, read_adapter
from service.engine.models.source import Progress

STORED, FILE_TYPE = gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0
_TURNED = ("llama",)
"""Architectures whose query and key rows llama.cpp keeps in another order than transformers."""
_AS_THEY_ARE = ("qwen2", "qwen3")
_WRITTEN_BY_ITSELF = ("GGUF.", "general.architecture", "general.file_type", gguf.Keys.General.ALIGNMENT)
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_MODULES = ("gate_proj", "up_proj", "down_proj")


def merge_into_gguf(source: Path, adapter: Path, target: Path, progress: Progress) -> None:
    """Write `target`, `source` with the adapter in it. Raises AdapterRefused, SourceRefused."""
    reader = open_gguf(source)
    arch = str(_value(reader, "general.architecture"))
    if arch not in (*_TURNED, *_AS_THEY_ARE):
        raise AdapterRefused(f"an adapter is not merged into a GGUF of architecture {arch}: merge it before it is one")
    names = _names(arch, int(_value(reader, f"{arch}.block_count")))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    known = {hf: name for hf, name in names.items() if name in tensors}
    shapes = {hf: [int(n) for n in reversed(tensors[name].shape)] for hf, name in known.items()}
    changed = {known[hf]: (hf, pair) for hf, pair in read_adapter(adapter, shapes).items()}
    heads = {kind: int(_value(reader, f"{arch}.attention.{key}")) for kind, key in _HEADS.items()}
    writer = _writer(reader, target, arch)
    for done, (name, tensor) in enumerate(tensors.items()):
        data, kind = tensor.data, tensor.tensor_type
        if name in changed:
            hf, pair = changed[name]
            data, kind = _merged(tensor, _delta(pair, hf, heads if arch in _TURNED else {})), STORED
        writer.add_tensor(name, data, raw_dtype=kind)
        progress("merging", done + 1, len(tensors))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_HEADS = {"q_proj": "head_count", "k_proj": "head_count_kv"}


def _names(arch: str, n_blocks: int) -> dict[str, str]:
    """Name of a weight in transformers -> in a GGUF."""
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    table = gguf.get_tensor_name_map(kind, n_blocks)
    modules = [f"self_attn.{name}" for name in _MODULES] + [f"mlp.{name}" for name in _MLP_MODULES]
    found = {}
    for module in (f"model.layers.{layer}.{module}" for layer in range(n_blocks) for module in modules):
        found[f"{module}.weight"] = f"{table.get_name(module)}.weight"
    return found


def _delta(pair: LowRank, name: str, heads: dict[str, int]) -> npt.NDArray[np.float32]:
    delta = pair.delta().numpy()
    n_heads = heads.get(name.split(".")[-2])
    if n_heads is None:
        return delta
    # As llama.cpp's converter does: the two halves of a head, which RoPE turns together, row by row.
    halves = delta.reshape(n_heads, 2, -1, delta.shape[1])
    return halves.swapaxes(1, 2).reshape(delta.shape)


def _merged(tensor: Any, delta: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return gguf.quants.quantize(weight.astype(np.float32) + delta, STORED)


def _value(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise AdapterRefused(f"the GGUF does not say its {key}")
    return field.contents()


def _writer(reader: Any, target: Path, arch: str) -> Any:
    """A writer with all that the file says of itself."""
    writer = gguf.GGUFWriter(target, arch)
    if reader.alignment != gguf.GGUF_DEFAULT_ALIGNMENT:
        writer.add_custom_alignment(int(reader.alignment))  # where tensors begin follows from it
    for field in reader.fields.values():
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        is_empty = is_array and not len(field.data)  # the writer knows no empty lists
        if not field.name.startswith(_WRITTEN_BY_ITSELF) and not is_empty:
            sub_type = field.types[-1] if is_array else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    writer.add_file_type(FILE_TYPE)
    return writer
