"""exllamav2's quantized matrices as our own product reads them: the stored tensors, nothing copied but small tables.

exllamav2 changes some of them in place while loading: words are shuffled, EXL2's group maxima divided by 256 and
multiplied with the model's factor, GPTQ's rows put in order of their groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH = 128
"""Inputs that the product takes at a time."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """4-bit weights ``[n_in, n_out]``. `words` int32 ``[n_in / 8, n_out]``; `scales`, `tops`: see `product_kernel`.

    `group`: inputs that share a scale. `order` int32 ``[n_in]``: the input that each stored row belongs to. `bias` FP16
    ``[n_out]``.
    """

    words: Tensor
    scales: Tensor
    tops: Tensor
    group: int
    gptq: bool
    order: Tensor
    bias: Tensor | None

    @property
    def n_in(self) -> int:
        return self.words.shape[0] * 8

    @property
    def n_out(self) -> int:
        return self.words.shape[1]

    @property
    def nbytes(self) -> int:
        """What a product reads."""
        return sum(t.numel() * t.element_size() for t in (self.words, self.scales, self.tops))


def matrix_of(tensors: Mapping[str, Tensor] | None) -> Matrix | None:
    """From a loaded linear's `q_tensors`; None for a matrix that our product does not read: not quantized, of other
    widths than 4 bits, or with groups that are no runs of 32 inputs or more."""
    if tensors is None:
        return None
    if "q_weight" in tensors:
        return _from_exl2(tensors)
    return _from_gptq(tensors) if "qweight" in tensors else None


def _from_exl2(tensors: Mapping[str, Tensor]) -> Matrix | None:
    words, groups = tensors["q_weight"], tensors["q_groups"].cpu().to(torch.int32).view(-1, 2)
    group = 128 if len(groups) == 1 else int(groups[1, 1] - groups[0, 1]) * 8
    starts = torch.arange(len(groups), dtype=torch.int32) * (group // 8)
    regular = group in (32, 64, 128) and torch.equal(groups[:, 1], starts)
    rows = (len(groups) - 1) * (group // 8) < len(words) <= len(groups) * (group // 8)
    if not regular or not rows or not bool((groups[:, 0] == 4).all()):
        return None
    return Matrix(
        words=words,
        scales=tensors["q_scale"],
        tops=tensors["q_scale_max"],
        group=group,
        gptq=False,
        order=_order(tensors, len(words) * 8),
        bias=tensors.get("bias"),
    )


def _from_gptq(tensors: Mapping[str, Tensor]) -> Matrix | None:
    words, scales = tensors["qweight"], tensors["scales"]
    n_in, n_groups, group = len(words) * 8, len(scales), 32
    while group * n_groups < n_in:  # as QMatrix does
        group *= 2
    if scales.dtype != torch.float16 or scales.shape[1] != words.shape[1]:
        return None
    if "g_idx" in tensors and "q_perm" in tensors and not _regular(tensors["g_idx"], group):
        return None
    order = _order(tensors, n_in)
    return Matrix(words, scales, tensors["qzeros"], group, True, order, tensors.get("bias"))


def _regular(group_of_input: Tensor, group: int) -> bool:
    """Whether every group but the last has its full number of inputs."""
    counts = torch.bincount(group_of_input.cpu().long())
    return bool((counts[:-1] == group).all()) and int(counts[-1]) <= group


def _order(tensors: Mapping[str, Tensor], n_in: int) -> Tensor:
    if "q_perm" not in tensors:
        return torch.arange(n_in, dtype=torch.int32)
    return tensors["q_perm"].cpu().to(torch.int32) & 0xFFFF  # unsigned numbers of 16 bits


def arrangement(order: Tensor) -> Tensor:
    """int32 ``[padded]``: the input at each place of what the product reads, -1 for none. See `kernels.product`."""
    padded = torch.full((-(-len(order) // WIDTH) * WIDTH,), -1, dtype=torch.int32)
    padded[: len(order)] = order
    return padded.view(-1, WIDTH // 8, 8).transpose(1, 2).reshape(-1).contiguous()
