"""The converting process without a card: exllamav2's own Python, on CPU tensors, over a stand-in for its extension.

    PYTHONPATH=... python tests/service/engine/models/convert/on_cpu.py WORK

What the CUDA functions compute is written again here from their source, exllamav2 0.3.2 (`cuda/quantize.cu`,
`cuda/pack_tensor.cu`, `cpp/quantize_func.cpp`); the search over choices is another one. Devices named "cuda" are
the CPU.
"""

import contextlib
import sys
import types

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ext = types.ModuleType("exllamav2_ext")


def stand_in(function):
    setattr(ext, function.__name__, function)
    return function


@stand_in
def stloader_read(path, offset, nbytes, target):
    with open(path, "rb") as file:
        file.seek(offset)
        data = bytearray(file.read(nbytes))
    target.view(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))


@stand_in
def rms_norm(x, weight, y, epsilon):
    wide = x.float()
    y.copy_(wide * (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * weight.float())


@stand_in
def quantize_err(x, out, scale, zero, most, norm, min_p, max_p, grid):
    for i in range(grid + 1):
        share = i / grid
        s = scale * (min_p * (1 - share) + max_p * share)
        error = ((x / s).round().clamp(-zero, most - zero) * s - x).abs().pow(norm)
        out[i, 0] += error.sum()


def _row(weights, scale, zero, most):
    code = ((weights / scale).round() + zero).clamp(0, most)
    return code, ((code.half() - zero) * scale.half()).float()


@stand_in
def quantize_range(quant, scale, codes, zero, most, inverse, weights, error, a, b):
    for c in range(a, b):
        code, value = _row(weights[c], scale, zero, most)
        if codes.device.type != "meta":
            codes[c] = code.short()
        quant[c] = value
        error[c] = (weights[c] - value) / inverse[c, c]
        weights[c:b] -= inverse[c, c:b, None] * error[c]
    weights[b:] -= inverse[a:b, b:].T @ error[a:b]


@stand_in
def sim_anneal(slots, budget, initial, cooling, least, iterations, norm):
    """The least sum of errors for the bits, by a price of a bit that is halved in."""
    low, high = 0.0, 1.0
    for _ in range(60):
        price = (low + high) / 2
        chosen = [min(range(len(slot)), key=lambda i, slot=slot: slot[i][1] + price * slot[i][0]) for slot in slots]
        cost = sum(slot[i][0] for slot, i in zip(slots, chosen, strict=True))
        low, high = (low, price) if cost <= budget else (price, high)
    picked = [min(slot, key=lambda option: option[1] + high * option[0]) for slot in slots]
    chosen = [slot.index(option) for slot, option in zip(slots, picked, strict=True)]
    errors = [error for _, error in picked]
    return picked, chosen, sum(e**norm for e in errors), sum(cost for cost, _ in picked), max(errors)


@stand_in
def pack_rows_4(scales, out):
    nibbles = (scales.long() - 1).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    out.copy_(_as_int32(nibbles.sum(-1)))


@stand_in
def pack_columns(codes, out, bits):
    """Codes of a column follow each other in the bits of its words, lowest first."""
    stream = (codes.long()[:, None, :] >> torch.arange(bits)[None, :, None]) & 1
    words = stream.flatten(0, 1).unflatten(0, (-1, 32))
    out.copy_(_as_int32((words << torch.arange(32)[None, :, None]).sum(1)))


def _as_int32(values):
    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32)


def unpack(tensors: dict[str, Tensor]) -> Tensor:
    """FP16 ``[in, out]`` of packed weights: what the card's matrices are."""
    groups = tensors["q_groups"].view(-1, 2).tolist()
    words, permutation = tensors["q_weight"].long() & 0xFFFFFFFF, tensors["q_invperm"].long()
    scales = (tensors["q_scale"].long()[:, :, None] >> torch.arange(0, 32, 4) & 15).flatten(1) + 1
    rows = []
    for i, (bits, first) in enumerate(groups):
        last = groups[i + 1][1] if i + 1 < len(groups) else len(words)
        stream = (words[first:last, None, :] >> torch.arange(32)[None, :, None] & 1).flatten(0, 1)
        codes = (stream.unflatten(0, (-1, bits)) << torch.arange(bits)[None, :, None]).sum(1)
        scale = (scales[i] ** 2).half() * (tensors["q_scale_max"][i] * torch.tensor(1 / 256).half())
        rows.append((codes.half() - 2 ** (bits - 1)) * scale)
    return torch.cat(rows)[: len(permutation)][permutation]


matrices: dict[int, Tensor] = {}


def _matrix(tensors):
    matrices[handle := len(matrices) + 1] = unpack(tensors)
    return handle


def reconstruct(handle, out):
    out.copy_(matrices[handle])


def gemm_half_q_half(x, handle, out, _force=False):
    out.copy_(x @ matrices[handle])


def free_q_matrix(handle):
    del matrices[handle]


for function in (reconstruct, gemm_half_q_half, free_q_matrix):
    stand_in(function)


class OnCpu(TorchFunctionMode):
    """Calls that name a card get the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "cuda":
            return args[0]
        kwargs = {name: _here(value) for name, value in (kwargs or {}).items()}
        return func(*map(_here, args), **kwargs)


def _here(value):
    names_card = isinstance(value, str) and value.startswith("cuda:")
    is_card = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if names_card or is_card else value


def no_card(*_, **__):
    return contextlib.nullcontext()


class TorchWithoutCards:
    """torch, for a module that makes devices of bare numbers."""

    def __getattr__(self, name):
        return (lambda *_: torch.device("cpu")) if name == "device" else getattr(torch, name)


class NoStreams(dict):
    """Says that every device has its stream already."""

    def __contains__(self, key):
        return True

    def __missing__(self, key):
        return None


def main() -> None:
    sys.modules["exllamav2_ext"] = ext
    from service.engine.models.convert import child, steps  # noqa: F401, I001 - transformers first
    import exllamav2.ext
    from exllamav2.conversion import adaptivegptq

    adaptivegptq.torch = TorchWithoutCards()
    exllamav2.device.global_streams = NoStreams()
    for name in ("synchronize", "empty_cache", "set_stream", "set_device", "Stream", "device"):
        setattr(torch.cuda, name, no_card)
    exllamav2.ext.make_q_matrix = lambda tensors, *_, **__: _matrix(tensors)
    with OnCpu():
        child.main()


if __name__ == "__main__":
    main()
