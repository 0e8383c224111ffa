# pyright: basic, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""Products of few rows with exllamav2's 4-bit matrices, by our own kernels: the weights are read once for all rows.

exllamav2's own product turns every weight to FP16 again for each four rows and does not use the tensor cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from service.engine.exl2_engine.kernels.product import arrange_kernel, finish_kernel, gate_kernel, product_kernel
from service.engine.exl2_engine.matrices import WIDTH, Matrix, arrangement

PLACES = 1024
"""Numbers that one program of the smaller launches takes."""


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """`block_n`: outputs of a program. `shares`: parts that the inputs are cut into, each summed by itself."""

    block_n: int
    warps: int
    stages: int
    shares: int


def product_config(n_in: int, n_out: int, processors: int) -> ProductConfig:
    """For a card with this many multiprocessors: enough programs to have several on each."""
    block_n = 128 if n_out >= 128 * processors else 64
    tiles, blocks = -(-n_out // block_n), -(-n_in // WIDTH)
    shares = max(1, min(round(4 * processors / tiles), blocks // 4, 16))
    length = -(-blocks // shares)
    return ProductConfig(block_n, 4, 4, -(-blocks // length))


class Product:
    """One to three matrices with the same inputs, multiplied in one launch with up to 32 rows.

    `widths`: outputs of each. `tables` int32 ``[different orders, padded]`` on the device: see `arrange_kernel`.
    """

    def __init__(self, matrices: Sequence[Matrix], config: ProductConfig | None = None) -> None:
        """Raises ValueError for matrices that do not go together."""
        first, *others = matrices
        kinds = {(m.n_in, m.group, m.gptq, m.bias is None) for m in matrices}
        if len(kinds) != 1 or len(others) > 2:
            raise ValueError("matrices of one product must have equal inputs, groups and biases")
        device = first.words.device
        self.matrices = tuple(matrices)
        self.widths = [m.n_out for m in matrices]
        self.config = config or product_config(first.n_in, sum(self.widths), _processors(device))
        tables, self._table_of = _distinct([arrangement(m.order) for m in matrices])
        self.tables = torch.stack(tables).to(device)
        self._bias = None if first.bias is None else torch.cat([_vector(m) for m in matrices])
        self._even = first.n_in % WIDTH == 0 and all(n % self.config.block_n == 0 for n in self.widths)

    @property
    def padded(self) -> int:
        return self.tables.shape[1]

    def arrange(self, x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """Rows ``[rows, n_in]``, each dense, as `shares` takes them; RMS-normalized with the weights `norm`."""
        n_tables, padded = self.tables.shape
        out = torch.empty((n_tables, len(x), padded), dtype=torch.float16, device=x.device)
        grid = (len(x), n_tables, triton.cdiv(padded, PLACES))
        arrange_kernel[grid](
            x, x if norm is None else norm, self.tables, out, len(x), x.shape[1], padded, x.stride(0), eps,
            NORM=norm is not None, W=triton.next_power_of_2(x.shape[1]), BLOCK=PLACES, num_warps=8,
        )  # fmt: skip
        return out

    def shares(self, arranged: Tensor) -> Tensor:
        """FP32 ``[shares, rows, all outputs]`` of arranged inputs FP16 ``[tables, rows, padded]``."""
        rows, config, first = arranged.shape[1], self.config, self.matrices[0]
        part = torch.empty((config.shares, rows, sum(self.widths)), dtype=torch.float32, device=arranged.device)
        three = [self.matrices[min(i, len(self.matrices) - 1)] for i in range(3)]
        widths = self.widths + [0] * (3 - len(self.widths))
        tables = self._table_of + [0] * (3 - len(self._table_of))
        grid = (sum(triton.cdiv(n, config.block_n) for n in self.widths), config.shares)
        product_kernel[grid](
            arranged, *(m.words for m in three), *(m.scales for m in three), *(m.tops for m in three), part,
            rows, first.n_in, self.padded, *widths, tables[1], tables[2],
            MATRICES=len(self.matrices), GROUP=first.group, GPTQ=first.gptq, BLOCK_M=16 if rows <= 16 else 32,
            BLOCK_N=config.block_n, STAGES=config.stages, EVEN=self._even, FAST=arranged.is_cuda,
            num_warps=config.warps,
        )  # fmt: skip
        return part

    def finish(self, part: Tensor, residual: Tensor | None = None) -> list[Tensor]:
        """Outputs FP16 ``[rows, n]`` of each matrix. `residual`: added to, in place, instead of an output of its own;
        its rows are dense, one behind the other."""
        n_shares, rows, total = part.shape
        out = torch.empty(rows * total, dtype=torch.float16, device=part.device) if residual is None else residual
        widths = self.widths + [0] * (3 - len(self.widths))
        finish_kernel[rows, triton.cdiv(total, PLACES)](
            part, part if self._bias is None else self._bias, out, out, rows, *widths,
            SHARES=n_shares, BIAS=self._bias is not None, ADD=residual is not None, BLOCK=PLACES,
        )  # fmt: skip
        parts = out.view(-1).split([rows * n for n in self.widths])
        return [one.view(rows, n) for one, n in zip(parts, self.widths, strict=True)]

    def gate(self, part: Tensor, next_: "Product") -> Tensor:
        """``silu(first) * second`` of the shares of two matrices, arranged as inputs of `next_`."""
        n_shares, rows, total = part.shape
        out = torch.empty((1, rows, next_.padded), dtype=torch.float16, device=part.device)
        gate_kernel[rows, triton.cdiv(next_.padded, PLACES)](
            part, part if self._bias is None else self._bias, next_.tables, out, rows, total // 2, next_.padded,
            SHARES=n_shares, BIAS=self._bias is not None, BLOCK=PLACES,
        )  # fmt: skip
        return out


def _vector(matrix: Matrix) -> Tensor:
    assert matrix.bias is not None
    return matrix.bias.view(-1)


def _distinct(tables: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The different ones among some tensors, and which of them each is."""
    found: list[Tensor] = []
    places = []
    for table in tables:
        at = next((i for i, one in enumerate(found) if torch.equal(one, table)), len(found))
        found += [table] if at == len(found) else []
        places.append(at)
    return found, places


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
