"""Decode attention on a card: GB/s over the stored KV of one layer, against what a device copy reaches.

    python -m benchmarks.gpu_attention_tuning [--sweep] [--seconds 120] [--out attention.json]

Checks the results against FP64. Times whole calls of `attend` (document and merge), replayed from a CUDA graph over
documents that together are several times the L2 cache. With `--sweep` it tries configurations
of the document kernel, each compiled in a process beside, and prints the best for every KV type and number of rows.
"""

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from cache_store.codec import rotate
from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.kernels.attend import DecodeConfig, Sums, attend, decode_config, query_tile
from service.engine.exl2_engine.portable_records import decode_blocks, record_parts
from service.engine.exl2_engine.step import Step

DEVICE = "cuda"
GROUP_HEADS = 5
KV_HEADS = 8
HEAD_DIM = 128
N_DOCUMENTS = 3
TAIL_TOKENS = 64
NO_TAIL = 0


@dataclass(frozen=True, slots=True)
class Shape:
    kv_type: KVType
    rows: int
    tokens: int

    @property
    def layout(self) -> KVLayout:
        return KVLayout(1, KV_HEADS, HEAD_DIM, self.kv_type)

    @property
    def nbytes(self) -> int:
        return self.layout.bytes_per_token * self.tokens


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of `attend` for one document: `rows` sequences on it, each with its own tail."""

    step: Step
    q: Tensor
    pool: Tensor
    tail_k: Tensor
    tail_v: Tensor
    layout: KVLayout

    def run(self, config: DecodeConfig | None = None) -> Tensor:
        return attend(
            self.step, self.q, self.pool, self.tail_k, self.tail_v, HEAD_DIM**-0.5, self.layout, config=config
        )


def make_inputs(shape: Shape, n_documents: int, tail: int) -> list[Inputs]:
    """Documents of random codes and scales in one pool, their blocks in random order."""
    layout, per_document = shape.layout, shape.layout.n_blocks(shape.tokens)
    n_blocks = per_document * n_documents
    pool = torch.randint(0, 256, (n_blocks, layout.record_nbytes(256)), dtype=torch.uint8, device=DEVICE)
    k_codes, k_scales, v_codes, v_scales = record_parts(pool, layout)
    if shape.kv_type is KVType.FP16:
        for codes in (k_codes, v_codes):
            codes.copy_(torch.randn(*codes.shape[:3], HEAD_DIM, device=DEVICE).half().view(torch.uint8))
    for scales, bits in ((k_scales, shape.kv_type.key_bits), (v_scales, shape.kv_type.value_bits)):
        if bits < 16:
            random = torch.rand(*scales.shape[:3], HEAD_DIM // 32, device=DEVICE) * (4 / (1 << bits))
            scales.copy_(random.half().view(torch.uint8))
    order = torch.randperm(n_blocks, device=DEVICE).int().view(n_documents, per_document)
    return [make_one(shape, pool, table[None].clone(), tail) for table in order]


def make_one(shape: Shape, pool: Tensor, table: Tensor, tail: int) -> Inputs:
    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    rows = shape.rows
    step = Step(
        positions=ints(*[0] * rows),
        slots=ints(*range(rows)),
        tail_at=ints(*[-1] * rows),
        tail_end=ints(*[tail] * rows),
        group_rows=ints(0, rows),
        group_tokens=ints(shape.tokens),
        block_tables=table,
        max_group_rows=rows,
        max_tokens=shape.tokens,
        max_tail=tail,
    )
    tails = torch.randn(2, rows, KV_HEADS, max(tail, 1), HEAD_DIM, device=DEVICE).half()
    q = torch.randn(rows, KV_HEADS * GROUP_HEADS, HEAD_DIM, device=DEVICE).half()
    return Inputs(step, q, pool, tails[0], tails[1], shape.layout)


def reference(inputs: Inputs, shape: Shape) -> Tensor:
    k, v = (torch.empty(KV_HEADS, shape.tokens, HEAD_DIM, device=DEVICE) for _ in range(2))
    decode_blocks(inputs.pool, inputs.step.block_tables[0], shape.tokens, shape.layout, k, v)
    out = torch.empty(inputs.q.shape, dtype=torch.float64, device=DEVICE)
    for row in range(shape.rows):
        q = inputs.q[row].double().view(KV_HEADS, GROUP_HEADS, HEAD_DIM)
        keys, values = torch.cat((k, inputs.tail_k[row]), 1).double(), torch.cat((v, inputs.tail_v[row]), 1).double()
        out[row] = (torch.softmax(q @ keys.mT * HEAD_DIM**-0.5, -1) @ values).flatten(0, 1)
    if shape.kv_type is KVType.FP16:
        return out
    return out @ rotate(torch.eye(HEAD_DIM, device=DEVICE)).double()


def poison() -> None:
    """Fill memory that the next calls will be given with NaN."""
    torch.full((1 << 26,), torch.nan, device=DEVICE)


def error_of(shape: Shape, config: DecodeConfig | None = None) -> float:
    """Largest relative error of a vector."""
    inputs = make_inputs(shape, 1, TAIL_TOKENS)[0]
    poison()
    out = inputs.run(config).double()
    expected = reference(inputs, shape)
    return float(((out - expected).norm(dim=-1) / expected.norm(dim=-1)).nan_to_num(torch.inf).max())


def seconds_of(work: Callable[[], object], calls: int, budget: float = 0.03) -> float:
    """Seconds of one of the `calls` that `work` makes, replayed from a CUDA graph; the median of rounds."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    samples = []
    started = time.perf_counter()
    while len(samples) < 5 or time.perf_counter() - started < budget:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3 / calls)
    return sorted(samples)[len(samples) // 2]


def copy_ceiling() -> float:
    """Bytes a second, read and written, of a device copy."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE).zero_()
    y = torch.empty_like(x)
    return 2 * x.nbytes / seconds_of(lambda: [y.copy_(x) for _ in range(4)], 4)


def timed(inputs: list[Inputs], config: DecodeConfig | None) -> float:
    return seconds_of(lambda: [one.run(config) for one in inputs * 3], 3 * len(inputs))


def candidates(shape: Shape) -> list[DecodeConfig]:
    """Configurations worth compiling, without the number of programs per multiprocessor."""
    narrow = query_tile(shape.rows * GROUP_HEADS, HEAD_DIM, 90) == 16
    sums = (Sums.ROW, Sums.TOKEN) if narrow else (Sums.ROW, Sums.PRODUCT)
    shapes = [(64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3)]
    shapes += [] if narrow else [(64, 8, 2), (128, 8, 2), (128, 8, 3)]
    peels = (False,) if narrow else (True,)
    limits = (None, 128) if narrow else (None,)
    if shape.kv_type is KVType.FP16:
        shapes = shapes[:3] + shapes[-2:-1]
    every = itertools.product(shapes, sums, peels, limits)
    return [DecodeConfig(*size, sums, peel, registers, per_sm=0) for size, sums, peel, registers in every]


def compile_one(task: tuple[Shape, DecodeConfig]) -> str:
    """In a process of its own: leaves the compiled kernel in Triton's cache on disk."""
    shape, config = task
    try:
        make_inputs(replace(shape, tokens=600), 1, NO_TAIL)[0].run(replace(config, per_sm=1))
        torch.cuda.synchronize()
    except Exception as e:
        return f"{type(e).__name__}: {str(e)[:120]}"
    return ""


def sweep(shapes: list[Shape], ceiling: float, deadline: float) -> list[dict[str, object]]:
    """Times of every configuration that compiles; the best of each shape is checked."""
    tasks = [(shape, config) for shape in shapes for config in candidates(shape)]
    started = time.perf_counter()
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        failures = dict(zip(tasks, pool.map(compile_one, tasks, chunksize=4), strict=True))
    print(f"{len(tasks)} kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)
    for (shape, config), failure in failures.items():
        if failure:
            print(f"  {shape.kv_type} {shape.rows} {config}: {failure}")
    results = []
    for shape in shapes:
        inputs = make_inputs(shape, N_DOCUMENTS, NO_TAIL)
        found = []
        for config, per_sm in itertools.product(candidates(shape), (1, 2, 3, 4)):
            if failures[shape, config] or time.perf_counter() > deadline:
                continue
            chosen = replace(config, per_sm=per_sm)
            found.append((timed(inputs, chosen), chosen))
        found.sort(key=lambda one: one[0])
        for seconds, config in found[:3]:
            print(f"  {shape.kv_type} rows {shape.rows}: {seconds * 1e6:.1f} us {config}", flush=True)
        if found:
            seconds, config = found[0]
            error = error_of(replace(shape, tokens=4001), config)
            results.append(row_of(shape, seconds, ceiling) | {"config": asdict(config), "error": error})
    return results


def row_of(shape: Shape, seconds: float, ceiling: float) -> dict[str, object]:
    speed = shape.nbytes / seconds
    return {
        "kv_type": str(shape.kv_type),
        "rows": shape.rows,
        "tokens": shape.tokens,
        "us": round(seconds * 1e6, 2),
        "gb_per_s": round(speed / 1e9, 1),
        "of_copy": round(speed / ceiling, 4),
    }


def defaults(shapes: list[Shape], ceiling: float, capability: int) -> list[dict[str, object]]:
    results = []
    for shape in shapes:
        tile = query_tile(shape.rows * GROUP_HEADS, HEAD_DIM, capability)
        config = decode_config(shape.kv_type, tile, HEAD_DIM, capability)
        inputs = make_inputs(shape, N_DOCUMENTS, NO_TAIL)
        row = row_of(shape, timed(inputs, None), ceiling) | {"config": asdict(config)}
        row["error"] = error_of(replace(shape, tokens=4001))
        with_tail = [make_one(shape, one.pool, one.step.block_tables, 512) for one in inputs]
        results.append(row | {"us_with_512_of_tail": round(timed(with_tail, None) * 1e6, 2)})
        print(f"  default {results[-1]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--types", nargs="+", default=["k8v4", "k4v4", "k8v8", "fp16"])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path, default=Path("gpu_attention_tuning.json"))
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    major, minor = torch.cuda.get_device_capability()
    ceiling = copy_ceiling()
    shapes = [Shape(KVType(t), r, n) for n in options.tokens for t in options.types for r in options.rows]
    report = {"card": torch.cuda.get_device_name(), "copy_gb_per_s": round(ceiling / 1e9, 1)}
    report["default"] = defaults(shapes, ceiling, major * 10 + minor)
    report["best"] = sweep(shapes, ceiling, deadline) if options.sweep else []
    options.out.write_text(json.dumps(report, indent=1))
    print(f"{report['card']}, device copy {ceiling / 1e12:.2f} TB/s")
    for kind in ("default", "best"):
        for row in report[kind]:
            print(
                f"{kind:8}{row['kv_type']:5}{row['rows']:3} rows {row['tokens']:7} tokens {row['us']:8.1f} us "
                f"{row['gb_per_s']:7.0f} GB/s {100 * row['of_copy']:5.1f} % error {row['error']:.1e} {row['config']}"
            )


if __name__ == "__main__":
    main()
