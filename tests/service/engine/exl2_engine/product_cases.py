"""Random quantized matrices as exllamav2 leaves them in memory, and what their weights are, in plain NumPy.

The formulas are those of exllamav2 0.3.2: `shuffle_4bit_8` of qdq_4.cuh, `dq_scale` of qdq_util.cuh,
`reconstruct_kernel` and `make_sequential` of q_matrix.cu.
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Case:
    """`tensors`: a loaded linear's `q_tensors`. `weight` FP64 ``[n_in, n_out]``, its rows in the order of inputs."""

    tensors: dict[str, torch.Tensor]
    weight: np.ndarray


def shuffled(words: np.ndarray) -> np.ndarray:
    """Words of eight nibbles: those of even number to the low half, those of odd to the high one."""
    words = words.astype(np.uint32)
    out = np.zeros_like(words)
    for i in range(4):
        out |= ((words >> np.uint32(8 * i)) & np.uint32(15)) << np.uint32(4 * i)
        out |= ((words >> np.uint32(8 * i + 4)) & np.uint32(15)) << np.uint32(4 * i + 16)
    return out


def packed(values: np.ndarray, axis: int) -> np.ndarray:
    """Eight numbers of 4 bits along an axis in one word, the first in the lowest bits."""
    parts = np.moveaxis(values, axis, -1)
    parts = parts.reshape(*parts.shape[:-1], -1, 8).astype(np.uint32)
    words = (parts << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return np.moveaxis(words, -1, axis)


def int32(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32))


def exl2(n_in: int, n_out: int, group: int = 128, permuted: bool = False, seed: int = 0) -> Case:
    """A matrix of 4-bit groups; with `permuted` its rows are stored in another order than that of the inputs."""
    random = np.random.default_rng(seed)
    n_groups = -(-n_in // group)
    codes = random.integers(0, 16, (n_in, n_out))
    roots = random.integers(0, 16, (n_groups, n_out))
    tops = random.uniform(0.5, 1.5, n_groups).astype(np.float16) * np.float16(0.05 / 256)
    scales = ((roots + 1) ** 2).astype(np.float16) * tops[:, None]  # FP16, rounded once
    rows = np.arange(n_in) // group
    weight = (codes - 8) * scales.astype(np.float64)[rows]
    tensors = {
        "q_weight": int32(shuffled(packed(codes, 0))),
        "q_scale": int32(packed(roots, 1)),
        "q_scale_max": torch.from_numpy(tops),
        "q_groups": torch.tensor([x for g in range(n_groups) for x in (4, g * group // 8)], dtype=torch.int16),
    }
    if permuted:
        order = random.permutation(n_in)
        tensors["q_perm"] = torch.from_numpy(order.astype(np.uint16).view(np.int16))
        weight = weight[np.argsort(order)]
    return Case(tensors, weight)


def gptq(n_in: int, n_out: int, group: int = 128, act_order: bool = False, seed: int = 0) -> Case:
    """A GPTQ matrix; with `act_order` the groups of inputs are mixed, and the rows stored by group."""
    random = np.random.default_rng(seed)
    n_groups = -(-n_in // group)
    codes = random.integers(0, 16, (n_in, n_out))
    zeros = random.integers(0, 16, (n_groups, n_out))
    scales = (random.uniform(0.5, 1.5, (n_groups, n_out)) * 0.01).astype(np.float16)
    rows = np.arange(n_in) // group
    weight = (codes - zeros[rows] - 1) * scales.astype(np.float64)[rows]
    tensors = {
        "qweight": int32(shuffled(packed(codes, 0))),
        "qzeros": int32(packed(zeros, 1)),
        "scales": torch.from_numpy(scales),
    }
    if act_order:
        order = random.permutation(n_in)
        weight = weight[np.argsort(order)]
        tensors["g_idx"] = torch.from_numpy(rows[np.argsort(order)].astype(np.int32))
        tensors["q_perm"] = torch.from_numpy(order.astype(np.uint16).view(np.int16))
    return Case(tensors, weight)


def inputs(rows: int, n_in: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, n_in)).astype(np.float16))
