"""What a model's weights take on a card, told from the headers of its safetensors files, before anything is loaded.

exllamav2 0.3.2 keeps EXL2 and GPTQ tensors as they are stored, with maps beside them, and everything else in FP16
(`ExLlamaV2Module.load_weight`, `ext.make_q_matrix`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from service.engine.models.weights import TensorSpan

MIB = 1 << 20
_HALF = 2
_PAD = 32
"""exllamav2 pads the outputs of FP16 linears to a multiple of this."""

_EXL2_KEPT = ("q_weight", "q_scale", "q_scale_max", "q_groups", "bias")
_GPTQ_KEPT = ("qweight", "qzeros", "g_idx")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes in bytes of the tensors on the card: of the layers (the last norm included), of the embedding, of the
    head (none when it shares the embedding). `largest_matrix`: elements of the largest quantized matrix of a layer;
    `head_matrix`: of the head if that is quantized, else 0."""

    layers: tuple[int, ...]
    embedding: tuple[int, ...]
    head: tuple[int, ...]
    largest_matrix: int
    head_matrix: int

    @property
    def quantized(self) -> bool:
        return self.largest_matrix > 0


def weights_footprint(spans: Iterable[TensorSpan], *, share_head: bool) -> Footprint:
    """Footprint of a model directory's tensors. `share_head`: a head tied to the embedding is not held twice."""
    modules: dict[str, dict[str, TensorSpan]] = {}
    for span in spans:
        module, _, part = span.name.rpartition(".")
        modules.setdefault(module, {})[part] = span
    layers: list[int] = []
    embedding: list[int] = []
    head: list[int] = []
    largest = head_matrix = 0
    for name, parts in modules.items():
        if name.endswith("embed_tokens"):
            embedding += _module_tensors(name, parts, pad=False)
        elif name.endswith("lm_head"):
            head += _module_tensors(name, parts, pad=True)
            head_matrix = _quantized_elements(parts)
        else:
            layers += _module_tensors(name, parts, pad=True)
            largest = max(largest, _quantized_elements(parts))
    if not head and not share_head:
        head = list(embedding)
    return Footprint(tuple(layers), tuple(embedding), tuple(head), largest, head_matrix)


def _module_tensors(name: str, parts: dict[str, TensorSpan], *, pad: bool) -> list[int]:
    if "q_weight" in parts:
        return _exl2_tensors(name, parts)
    if "qweight" in parts:
        return _gptq_tensors(parts)
    return [_half_nbytes(part, span.shape, pad) for part, span in parts.items()]


def _exl2_tensors(name: str, parts: dict[str, TensorSpan]) -> list[int]:
    kept = [parts[part].nbytes for part in _EXL2_KEPT if part in parts]
    n_in = parts["q_invperm"].shape[0]
    kept.append(2 * n_in * 2)  # the group map: (group, rows left) as int16 for each input
    if not name.endswith("mlp.down_proj"):
        # its order is folded into the outputs of gate_proj and up_proj instead
        kept += [2 * n_in, 2 * n_in]
    return kept


def _gptq_tensors(parts: dict[str, TensorSpan]) -> list[int]:
    kept = [parts[part].nbytes for part in _GPTQ_KEPT if part in parts]
    kept += [_HALF * prod(parts[part].shape) for part in ("scales", "bias") if part in parts]
    if "g_idx" in parts:
        n_in = parts["qweight"].shape[0] * 8
        kept += [2 * n_in, 2 * n_in]
    return kept


def _half_nbytes(part: str, shape: tuple[int, ...], pad: bool) -> int:
    if pad and part == "weight" and len(shape) == 2:
        return _HALF * (-(-shape[0] // _PAD) * _PAD) * shape[1]
    return _HALF * prod(shape)


def _quantized_elements(parts: dict[str, TensorSpan]) -> int:
    if "q_weight" in parts:
        return parts["q_invperm"].shape[0] * parts["q_weight"].shape[1]
    if "qweight" in parts:
        return prod(parts["qweight"].shape) * 8
    return 0


def reserved_nbytes(tensors: Iterable[int]) -> int:
    """Bytes that torch's caching allocator takes from the card for tensors of these sizes.

    Its rules (c10/cuda/CUDACachingAllocator): up to 1 MiB they share segments of 2 MiB, up to 10 MiB segments of
    20 MiB, larger ones get their own, rounded up to 2 MiB. Each tensor takes a multiple of 512 bytes.
    """
    small = medium = large = 0
    for nbytes in tensors:
        taken = -(-nbytes // 512) * 512
        if taken <= MIB:
            small += taken
        elif taken < 10 * MIB:
            medium += taken
        else:
            large += -(-taken // (2 * MIB)) * 2 * MIB
    return -(-small // (2 * MIB)) * 2 * MIB + -(-medium // (20 * MIB)) * 20 * MIB + large
