"""Where a decode step's time goes: weights and KV read from memory, each against what the memory gives.

    python benchmarks/decode_parts.py [--write]

Shapes are those of the demo model (hidden 576, 9 query and 3 KV heads of 64). Every set of tensors is larger than the
processor's caches, so each figure is a read from memory.
"""

import argparse

import torch
from bench_report import machine, read_bandwidth, table, timed, write_section
from torch import nn

from cache_store.layout import KVLayout, KVType
from service.engine.torch_engine.few import FewRows, Share, TailRows
from service.engine.torch_engine.kv import DocumentKV, KVMemory, Tail
from service.engine.torch_engine.linear import RowLinear
from service.engine.torch_engine.scratch import Scratch

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
ROWS = (1, 4, 20)
N_MATRICES = 60
N_LAYERS = 24
N_TOKENS = 6000
REPEATS = 9


def linear_rows(dtype: torch.dtype, n_rows: int, peak: float) -> list[tuple[str, ...]]:
    rows = []
    for out_features, in_features in SHAPES:
        plain = [nn.Linear(in_features, out_features, bias=False).to(dtype) for _ in range(N_MATRICES)]
        nbytes = sum(linear.weight.nbytes for linear in plain)
        x = torch.randn(1, n_rows, in_features).to(dtype)
        speeds = []
        for modules in (plain, [RowLinear(linear) for linear in plain]):
            with torch.inference_mode():
                timing = timed(lambda modules=modules, x=x: [m(x) for m in modules], repeats=REPEATS)
            speeds.append(nbytes / timing.median)
        stock, ours = speeds
        what = f"linear {in_features} -> {out_features}, rows: {n_rows}, {name(dtype)}"
        rows.append((what, *speed_cells(stock, ours, peak)))
    return rows


def attention_rows(value_dtype: torch.dtype, n_rows: int, peak: float) -> tuple[str, ...]:
    """One token of `n_rows` sessions over a shared document, by sdpa over repeated heads and by ours."""
    memory = KVMemory(KVLayout(N_LAYERS, 3, 64, KVType.FP16), torch.float32, value_dtype, torch.device("cpu"))
    document = DocumentKV(memory, N_TOKENS)
    document.n_tokens = N_TOKENS
    keys, values = (x.normal_() for x in (document.k, document.v))  # whatever lies in them: speed is all
    shares = [Share(TailRows(Tail(memory, 8), 1), i, 1, None) for i in range(n_rows)]
    scratch = Scratch()
    q = torch.randn(9, n_rows, 64)

    def stock() -> None:
        for k, v in zip(keys, values, strict=True):
            k, v = (x[:, :N_TOKENS].float().repeat_interleave(3, 0)[None] for x in (k, v))
            nn.functional.scaled_dot_product_attention(q[None], k, v)

    def ours() -> None:
        if document.can_turn:
            document.turn(N_LAYERS)
        rows = FewRows(document, shares, 9, 3, scratch)
        for layer in range(N_LAYERS):
            rows.attend(layer, q)

    with torch.inference_mode():
        speeds = [document.nbytes / timed(work, repeats=REPEATS).median for work in (stock, ours)]
    what = f"attention over {N_TOKENS} tokens, {n_rows} sessions, keys float32, values {name(value_dtype)}"
    return (what, *speed_cells(*speeds, peak))


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def speed_cells(stock: float, ours: float, peak: float) -> tuple[str, ...]:
    return (f"{stock / 1e9:.1f}", f"{ours / 1e9:.1f}", f"{ours / stock:.2f}x", f"{ours / peak:.0%}")


def report() -> str:
    peak = read_bandwidth()
    cases = [(torch.float32, n) for n in ROWS] + [(torch.bfloat16, 1)]
    rows = [row for dtype, n in cases for row in linear_rows(dtype, n, peak)]
    rows += [attention_rows(dtype, n, peak) for dtype in (torch.float32, torch.bfloat16) for n in (1, 4)]
    header = ("what", "torch GB/s", "ours GB/s", "ratio", "of the memory's")
    return "\n".join(
        (
            "## Parts of a decode step (`benchmarks/decode_parts.py`)",
            "",
            f"{machine()}. Memory is read at {peak / 1e9:.1f} GB/s. Medians of {REPEATS} after one warm-up.",
            "",
            table(header, rows),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    arguments = parser.parse_args()
    text = report()
    print(text)
    if arguments.write:
        write_section("decode parts", text)


if __name__ == "__main__":
    main()
