"""Products of few rows with 4-bit weights on a card: milliseconds and GB/s of a layer's matrices, ours and exllamav2's.

    PYTHONPATH=. python benchmarks/gpu_product.py [--sweep] [--seconds 120] [--out product.json]

The shapes are those of a 27B model. Results are checked against FP64 on the weights that exllamav2 dequantizes. Calls
are replayed from a CUDA graph over sets of weights that together are several times the L2 cache. With `--sweep`
configurations of the kernel are tried, each compiled in a process beside, and the best printed last. Without exllamav2
there is nothing to compare with, and the weights are dequantized here.
"""

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from service.engine.exl2_engine.matrices import Matrix, matrix_of
from service.engine.exl2_engine.products import Product, ProductConfig, product_config

DEVICE = "cuda"
SHAPES = {
    "q, k, v": (5120, (5120, 1024, 1024)),
    "o": (5120, (5120,)),
    "gate, up": (5120, (21504, 21504)),
    "down": (21504, (5120,)),
}
ROWS = (1, 2, 4, 8, 16, 32)
LAYERS = 64
SETS_NBYTES = 256 << 20
TUNING_CALLS = 201


@dataclass(frozen=True, slots=True)
class Set:
    """The matrices of one product, and exllamav2's handles of them; none without it."""

    tensors: tuple[dict[str, Tensor], ...]
    handles: tuple[Any, ...]

    @property
    def matrices(self) -> list[Matrix]:
        found = [matrix_of(tensors) for tensors in self.tensors]
        assert all(found)
        return [matrix for matrix in found if matrix]

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices)


def exllama() -> Any:
    """Its extension, or None."""
    try:
        from exllamav2 import ext  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return ext


def random_tensors(n_in: int, n_out: int) -> dict[str, Tensor]:
    groups = n_in // 128
    starts = torch.arange(groups, dtype=torch.int16) * 16
    return {
        "q_weight": torch.randint(-(1 << 31), (1 << 31) - 1, (n_in // 8, n_out), dtype=torch.int32, device=DEVICE),
        "q_scale": torch.randint(-(1 << 31), (1 << 31) - 1, (groups, n_out // 8), dtype=torch.int32, device=DEVICE),
        "q_scale_max": torch.full((groups,), 0.0174, dtype=torch.float16, device=DEVICE),
        "q_groups": torch.stack([torch.full_like(starts, 4), starts], 1).view(-1).to(DEVICE),
        "q_invperm": torch.arange(n_in, dtype=torch.int32, device=DEVICE),
        "q_perm": torch.arange(n_in, dtype=torch.int32, device=DEVICE),
    }


def make_set(shape: tuple[int, Sequence[int]], ext: Any) -> Set:
    n_in, widths = shape
    tensors = tuple(random_tensors(n_in, n) for n in widths)
    if ext is None:
        for one in tensors:
            one["q_scale_max"] /= 256
        return Set(tensors, ())
    scratch = torch.empty(n_in * max(widths) * 2 + 256, dtype=torch.uint8, device=DEVICE).view(torch.float16)
    return Set(tensors, tuple(ext.make_q_matrix(one, scratch, max_dq_rows=0) for one in tensors))


def make_sets(shape: tuple[int, Sequence[int]], ext: Any) -> list[Set]:
    first = make_set(shape, ext)
    return [first] + [make_set(shape, ext) for _ in range(max(2, SETS_NBYTES // first.nbytes))]


def seconds_of(work: Callable[[], object], calls: int, least: int = 5) -> float:
    """Seconds of one of the `calls` that `work` makes, replayed from a CUDA graph; the median."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    samples = []
    for _ in range(least):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3 / calls)
    return sorted(samples)[len(samples) // 2]


def rows_of(n: int, n_in: int) -> Tensor:
    return torch.randn(n, n_in, device=DEVICE).half()


def whole(products: list[Product], x: Tensor) -> None:
    for product in products:
        product.finish(product.shares(product.arrange(x)))


def theirs(ext: Any, sets: list[Set], x: Tensor) -> float | None:
    """Seconds of exllamav2's products of one set."""
    if ext is None:
        return None
    outs: dict[int, Tensor] = {}

    def work() -> None:
        for one in sets:
            for tensors, handle in zip(one.tensors, one.handles, strict=True):
                n = tensors["q_weight"].shape[1]
                out = outs.setdefault(n, torch.empty(len(x), n, dtype=torch.float16, device=DEVICE))
                ext.exllamav2_ext.gemm_half_q_half(x, handle, out, False)

    for _ in range(-(-TUNING_CALLS // len(sets))):
        work()
    return seconds_of(work, len(sets))


def error_of(ext: Any, one: Set, product: Product, x: Tensor) -> float:
    """Largest error of an output, in shares of the largest output."""
    found = product.finish(product.shares(product.arrange(x)))
    worst = 0.0
    for i, (tensors, y) in enumerate(zip(one.tensors, found, strict=True)):
        if ext is None:
            weight = dequantized(tensors)
        else:
            n_in, n_out = tensors["q_weight"].shape[0] * 8, tensors["q_weight"].shape[1]
            weight = torch.empty(n_in, n_out, dtype=torch.float16, device=DEVICE)
            ext.exllamav2_ext.reconstruct(one.handles[i], weight)
        expected = x.double() @ weight.double()
        worst = max(worst, float(((y.double() - expected).abs().max() / expected.abs().max()).nan_to_num(torch.inf)))
    return worst


def dequantized(tensors: dict[str, Tensor]) -> Tensor:
    """FP64 weights of a loaded matrix whose rows are in order."""
    words, scales = tensors["q_weight"], tensors["q_scale"]
    shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], device=DEVICE, dtype=torch.int32)
    codes = ((words[:, None, :] >> shifts[:, None]) & 15).flatten(0, 1)
    places = torch.arange(0, 32, 4, device=DEVICE, dtype=torch.int32)
    roots = ((scales[:, :, None] >> places) & 15).flatten(1) + 1
    scale = (roots * roots).half() * tensors["q_scale_max"][:, None]
    return (codes - 8).double() * scale.double().repeat_interleave(128, 0)


def candidates() -> list[ProductConfig]:
    """Configurations worth compiling, without the number of shares."""
    found = itertools.product((32, 64, 128, 256), (2, 4, 8), (3, 4, 6))
    return [ProductConfig(n, w, s, 1) for n, w, s in found if 8 * w <= n <= 64 * w and n * s <= 768]


def compile_one(task: tuple[int, int, ProductConfig]) -> str:
    """In a process of its own: leaves the compiled kernel in Triton's cache on disk."""
    matrices, n_rows, config = task
    try:
        made = make_set((256, [256] * matrices), None)
        product = Product(made.matrices, config)
        product.shares(product.arrange(rows_of(n_rows, 256)))
        torch.cuda.synchronize()
    except Exception as e:
        return f"{type(e).__name__}: {str(e)[:120]}"
    return ""


def compile_all() -> dict[tuple[int, int, ProductConfig], str]:
    tasks = list(itertools.product((1, 2, 3), (16, 32), candidates()))
    started = time.perf_counter()
    with ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as pool:
        failures = dict(zip(tasks, pool.map(compile_one, tasks, chunksize=4), strict=True))
    print(f"{len(tasks)} kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)
    for task, failure in failures.items():
        if failure:
            print(f"  {task}: {failure}")
    return failures


def sweep(name: str, sets: list[Set], failures: dict, deadline: float) -> dict[int, ProductConfig]:
    """The best configuration for 8 and for 32 rows, by the time of the whole product."""
    n_in, widths = SHAPES[name]
    best: dict[int, ProductConfig] = {}
    for n_rows in (8, 32):
        x, found = rows_of(n_rows, n_in), []
        for config, shares in itertools.product(candidates(), (1, 2, 3, 4, 6, 8, 12)):
            failed = failures[len(widths), 16 if n_rows <= 16 else 32, config]
            length = -(-(n_in // 128) // shares)
            programs = sum(widths) // config.block_n * shares
            if failed or time.perf_counter() > deadline or not 100 <= programs <= 4000 or length < 3:
                continue
            chosen = ProductConfig(config.block_n, config.warps, config.stages, -(-(n_in // 128) // length))
            products = [Product(one.matrices, chosen) for one in sets]
            found.append((seconds_of(lambda p=products, x=x: whole(p, x), len(sets), 3), chosen))
        found.sort(key=lambda one: one[0])
        for seconds, config in found[:4]:
            print(f"  {name} rows {n_rows}: {seconds * 1e6:.1f} us {config}", flush=True)
        if found:
            best[n_rows] = found[0][1]
    return best


def measure(name: str, sets: list[Set], ext: Any, config: ProductConfig | None, n_rows: int) -> dict[str, Any]:
    n_in = SHAPES[name][0]
    products, x = [Product(one.matrices, config) for one in sets], rows_of(n_rows, n_in)
    arranged = products[0].arrange(x)
    kernel = seconds_of(lambda: [p.shares(arranged) for p in products], len(sets))
    return {
        "product": name,
        "rows": n_rows,
        "kernel_us": round(kernel * 1e6, 2),
        "whole_us": round(seconds_of(lambda: whole(products, x), len(sets)) * 1e6, 2),
        "exllamav2_us": round((theirs(ext, sets, x) or 0.0) * 1e6, 2),
        "kernel_gb_per_s": round(sets[0].nbytes / kernel / 1e9, 1),
        "error": error_of(ext, sets[0], products[0], x),
        "config": asdict(products[0].config),
    }


def totals(found: list[dict[str, Any]]) -> list[str]:
    lines = []
    for n_rows in ROWS:
        rows = [row for row in found if row["rows"] == n_rows]
        kernel, mine, other = (
            sum(row[key] for row in rows) * LAYERS / 1e3 for key in ("kernel_us", "whole_us", "exllamav2_us")
        )
        lines.append(
            f"{n_rows:3} rows, {LAYERS} layers: kernels {kernel:.2f} ms, whole {mine:.2f} ms, exllamav2 {other:.2f} ms"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path, default=Path("gpu_product.json"))
    options = parser.parse_args()
    started = time.perf_counter()
    ext = exllama()
    failures = compile_all() if options.sweep else {}
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    report: dict[str, list] = {"default": [], "best": []}
    with torch.inference_mode():
        for i, (name, shape) in enumerate(SHAPES.items()):
            sets = make_sets(shape, ext)
            default = product_config(shape[0], sum(shape[1]), processors)
            report["default"] += [measure(name, sets, ext, default, n) for n in ROWS]
            deadline = started + options.seconds * (0.4 + 0.15 * (i + 1))
            best = sweep(name, sets, failures, deadline) if options.sweep else {}
            for n_rows in ROWS if best else ():
                config = best.get(8 if n_rows <= 16 else 32)
                report["best"].append(measure(name, sets, ext, config, n_rows))
            del sets
            torch.cuda.empty_cache()
    options.out.write_text(json.dumps(report, indent=1))
    for kind, found in report.items():
        for row in found:
            print(kind, row)
        for line in totals(found) if found else ():
            print(kind, line)


if __name__ == "__main__":
    main()
