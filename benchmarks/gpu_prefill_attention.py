"""Attention of document chunks and the kernels around it on an NVIDIA card: right first, then how fast.

    PYTHONPATH=. python benchmarks/gpu_prefill_attention.py [--kv k8v4] [--heads 40] [--kv-heads 8] [--head-dim 128]

One layer, a chunk of 2,048 tokens behind 0 to 128K tokens, each of torch's attention kernels that works here. Times
are medians of CUDA events around whole calls; TFLOP/s count the products of causal attention only, so decoding the
past, merging and transforming back are paid from them. With $OUT set, the numbers also go to
`$OUT/prefill_attention.json`. Takes about a minute.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cache_store.codec import rotate
from cache_store.layout import BLOCK_TOKENS, KVLayout, KVType
from service.engine.exl2_engine import prefill_attention, sdpa
from service.engine.exl2_engine.kernels import norm
from service.engine.exl2_engine.portable import PortableBackend
from service.engine.exl2_engine.sdpa import Method
from service.engine.exl2_engine.step import Step
from service.engine.exl2_engine.triton_backend import TritonBackend

CHUNK = 2048
PASTS = (0, 8192, 32768, 131072)
DENSE_MS = 4.5
"""The rest of a 27B-shaped layer for such a chunk, as measured: for the estimate of tokens a second."""
LAYERS = 64


def milliseconds(work: Callable[[], object], budget: float = 1.0) -> float:
    """Median time of a call, of at most 20 within `budget` seconds."""
    work()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 3 or (len(times) < 20 and time.perf_counter() < end):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


@dataclass
class Bench:
    """A random document of 128K tokens in a pool, and a chunk."""

    layout: KVLayout
    heads: int
    lines: list[str] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kv_heads, d = self.layout.n_kv_heads, self.layout.head_dim
        n_blocks = PASTS[-1] // BLOCK_TOKENS
        self.pool = torch.empty(n_blocks, self.layout.record_nbytes(BLOCK_TOKENS), dtype=torch.uint8, device="cuda")
        self.blocks = torch.randperm(n_blocks, device="cuda").int()
        self.past = [_random(PASTS[-1], kv_heads, d) for _ in range(2)]
        self.q, self.k, self.v = _random(CHUNK, self.heads, d), _random(CHUNK, kv_heads, d), _random(CHUNK, kv_heads, d)
        self.backend = TritonBackend(self.layout)
        self.backend.encode(*self.past, self.pool, self.blocks)

    def note(self, name: str, value: float, text: str) -> None:
        self.numbers[name] = round(value, 4)
        self.lines.append(text)
        print(text, flush=True)

    def prefill(self, method: Method | None, past: int, backend: type = TritonBackend) -> Callable[[], Tensor]:
        arguments = (self.layout, method) if backend is TritonBackend else (self.layout, "cuda", method)
        made, blocks = backend(*arguments), self.blocks[: past // BLOCK_TOKENS]
        scale = self.layout.head_dim**-0.5
        return lambda: made.prefill(self.q, self.k, self.v, self.pool, blocks, past, scale)

    def exact(self, past: int, *, causal: bool = True) -> Tensor:
        """FP64 on the past as decoded."""
        shape = (2, self.layout.n_kv_heads, past, self.layout.head_dim)
        decoded = torch.empty(shape, dtype=self.q.dtype, device="cuda")
        self.backend.decode(self.pool, self.blocks, past, decoded[0], decoded[1])
        keys, values = (torch.cat((x, y.transpose(0, 1)), 1) for x, y in zip(decoded, (self.k, self.v), strict=True))
        group, scale = self.heads // self.layout.n_kv_heads, self.layout.head_dim**-0.5
        outs = [
            sdpa.exact(q, k.expand(group, -1, -1), v.expand(group, -1, -1), scale, causal=causal)[0]
            for q, k, v in zip(self.q.transpose(0, 1).split(group), keys, values, strict=True)
        ]
        turned = torch.cat(outs).transpose(0, 1)
        return turned if self.layout.kv_type is KVType.FP16 else rotate(turned.float()).double()


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def methods() -> list[Method]:
    return [m for m in Method if m is not Method.PLAIN and sdpa.works(m, torch.device("cuda"), torch.float16, 128)]


def check(bench: Bench) -> None:
    """Every kernel against FP64, and that the comparison would notice a missing mask. Raises AssertionError."""
    exact, blind = bench.exact(4096), bench.exact(4096, causal=False)
    assert (blind - exact).norm() / exact.norm() > 0.05
    for backend in (TritonBackend, PortableBackend):
        for method in methods():
            out = bench.prefill(method, 4096, backend)().double()
            error = float((out - exact).norm() / exact.norm())
            bench.note(f"error_{backend.__name__}_{method}", error, f"{backend.__name__} {method}: error {error:.1e}")
            assert error < 2e-3


def ceiling(bench: Bench) -> float:
    a, b = _random(8192, 8192), _random(8192, 8192)
    tflops = 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9
    bench.note("cublas_tflops", tflops, f"cuBLAS FP16 8192^3: {tflops:.0f} TFLOP/s")
    return tflops


def attention(bench: Bench, most: float) -> None:
    for method in methods():
        times: list[float] = []
        for past in PASTS:
            work = bench.prefill(method, past)
            begun = time.perf_counter()
            work()
            torch.cuda.synchronize()
            first = time.perf_counter() - begun
            ms = milliseconds(work)
            times.append(ms)
            pairs = CHUNK * past + CHUNK * (CHUNK + 1) / 2
            tflops = 4 * pairs * bench.heads * bench.layout.head_dim / ms / 1e9
            text = f"{method:9} past {past:6}: {ms:7.3f} ms {tflops:4.0f} TFLOP/s {tflops / most:4.0%} of cuBLAS"
            bench.note(f"{method}_{past}_ms", ms, f"{text}, first call {first * 1e3:.0f} ms")
        for tokens, speed in _speeds(times).items():
            text = f"{method:9} {LAYERS} such layers with {DENSE_MS} ms each beside: {speed:.0f} tok/s over {tokens}"
            bench.note(f"{method}_tokens_per_second_{tokens}", speed, text)


def _speeds(times: list[float]) -> dict[int, float]:
    """Tokens a second averaged over documents of 8K and 128K, times in between interpolated."""
    speeds: dict[int, float] = {}
    for tokens in (8192, 131072):
        chunks = [_interpolated(past, times) + DENSE_MS for past in range(0, tokens, CHUNK)]
        speeds[tokens] = tokens / (sum(chunks) * LAYERS / 1e3)
    return speeds


def _interpolated(past: int, times: list[float]) -> float:
    at = next(i for i in range(1, len(PASTS)) if past <= PASTS[i])
    share = (past - PASTS[at - 1]) / (PASTS[at] - PASTS[at - 1])
    return times[at - 1] * (1 - share) + times[at] * share


def pieces(bench: Bench) -> None:
    """How many tokens to decode at a time."""
    for tokens in (8192, 16384, 32768, 65536):
        prefill_attention.PIECE_TOKENS = tokens
        ms = milliseconds(bench.prefill(None, 131072), 0.5)
        bench.note(f"piece_{tokens}_ms", ms, f"best      past 131072 in pieces of {tokens}: {ms:.3f} ms")
    prefill_attention.PIECE_TOKENS = 16384


def records(bench: Bench) -> None:
    """GB/s, read and written, of whole documents."""
    layout, n = bench.layout, PASTS[-1]
    out = [torch.empty(layout.n_kv_heads, n, layout.head_dim, dtype=torch.float16, device="cuda") for _ in range(2)]
    moved = (n * layout.record_nbytes(1) + sum(x.nbytes for x in out)) / 1e6
    for name, work in (
        ("decode", lambda: bench.backend.decode(bench.pool, bench.blocks, n, *out)),
        ("encode", lambda: bench.backend.encode(*bench.past, bench.pool, bench.blocks)),
    ):
        ms = milliseconds(work)
        bench.note(f"{name}_gb_per_s", moved / ms, f"{name} 128K tokens: {ms:.3f} ms, {moved / ms:.0f} GB/s")
    part = bench.layout.n_blocks(CHUNK)
    ms = milliseconds(lambda: bench.backend.encode(bench.k, bench.v, bench.pool, bench.blocks[:part]))
    bench.note("encode_chunk_ms", ms, f"encode a chunk of {CHUNK}: {ms:.3f} ms")
    bench.backend.encode(*bench.past, bench.pool, bench.blocks)


def small(bench: Bench) -> None:
    """What is launched around attention, in microseconds: in a graph at decode, as calls for a chunk."""
    d, kv_heads = bench.layout.head_dim, bench.layout.n_kv_heads
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, d, 2, device="cuda") / d)
    for rows in (1, 8):
        q, k, v = _random(rows, bench.heads + 2 * kv_heads, d).split((bench.heads, kv_heads, kv_heads), 1)
        ints = ([131072] * rows, range(rows), [5] * rows, [6] * rows, [0, rows], [0], [[0]])
        step = Step(*(torch.tensor(list(x), dtype=torch.int32, device="cuda") for x in ints), rows, 0, 64)
        tails = [torch.zeros(rows, kv_heads, 64, d, dtype=torch.float16, device="cuda") for _ in range(2)]
        x, weight = _random(rows, 5120), _random(5120)
        for name, work in (
            ("fused_append", lambda: bench.backend.fused_append(q, k, v, step, inv_freq, 1.0, *tails)),  # noqa: B023
            ("add_rmsnorm", lambda: norm.add_rmsnorm(x, x, weight, 1e-5)),  # noqa: B023
        ):
            us = _in_graph(work)
            bench.note(f"{name}_{rows}_us", us, f"{name} of {rows} rows in a graph: {us:.1f} us")
    positions = torch.arange(CHUNK, device="cuda").int() + 129000
    for name, work in (
        ("rope_and_rotate", lambda: bench.backend.rope_and_rotate(bench.q, positions, inv_freq, 1.0)),
        ("rotate", lambda: bench.backend.rotate(bench.q)),
    ):
        us = milliseconds(work) * 1e3
        bench.note(f"{name}_us", us, f"{name} of a chunk's queries: {us:.0f} us")


def _in_graph(work: Callable[[], object], repeats: int = 50) -> float:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    return milliseconds(graph.replay) * 1e3 / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", type=KVType, default=KVType.K8V4)
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(0)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {args.kv}, {args.heads}/{args.kv_heads} heads of {args.head_dim}")
    bench = Bench(KVLayout(1, args.kv_heads, args.head_dim, args.kv), args.heads)
    check(bench)
    most = ceiling(bench)
    records(bench)
    small(bench)
    pieces(bench)
    attention(bench, most)
    if out := os.environ.get("OUT"):
        (Path(out) / "prefill_attention.json").write_text(json.dumps({"device": name, **bench.numbers}, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
