"""The attention of a decode step alone: bytes of quantized KV that it reads a second, against a copy on the card."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu_documents import filled
from benchmarks.gpu_lib import DEVICE, ON_CARD, Result, Row, device_timed, spread, sync
from benchmarks.gpu_models import Opened
from service.engine.exl2_engine.backends import select_backend
from service.engine.exl2_engine.step import Step

TAIL_TOKENS = 64
TARGET_SHARE = 0.5


def one_group(blocks: Tensor, n_tokens: int, n_rows: int) -> Step:
    """A step of `n_rows` users of one document, one row each, `TAIL_TOKENS` tokens behind it."""

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    slots = list(range(n_rows))
    return Step(
        positions=numbers([n_tokens + TAIL_TOKENS - 1] * n_rows),
        slots=numbers(slots),
        tail_at=numbers([TAIL_TOKENS - 1] * n_rows),
        tail_end=numbers([TAIL_TOKENS] * n_rows),
        group_rows=numbers([0, n_rows]),
        group_tokens=numbers([n_tokens]),
        block_tables=blocks.to(torch.int32)[None],
        max_group_rows=n_rows,
        max_tokens=n_tokens,
        max_tail=TAIL_TOKENS,
    )


def add_rows(result: Result, open_: Opened, n_context: int, users: tuple[int, ...], copy_nbytes_s: float) -> None:
    """One row per number of users: all layers' attention over one document of random KV."""
    runner = open_.runner
    document = filled(runner, n_context)
    try:
        for n in users:
            seconds = device_timed(_all_layers(open_, document.blocks, n_context, n), repeats=20, warm_up=3)
            nbytes = n_context * runner.layout.bytes_per_token
            speed = nbytes / seconds.median
            share = speed / copy_nbytes_s
            name = "1 user" if n == 1 else f"{n} users"
            result.add(
                Row(
                    what=f"{runner.layout.kv_type}, {n_context} tokens, {name}: attention alone",
                    figure=f"{speed / 1e9:.0f} GB/s, {seconds.median * 1e3:.2f} ms for all layers",
                    spread=f"{spread(seconds.samples, 1e3)} ms",
                    bound=f"{share:.0%} of {copy_nbytes_s / 1e9:.0f} GB/s",
                    target=f"{TARGET_SHARE:.0%}",
                    met=share >= TARGET_SHARE,
                )
            )
    finally:
        runner.free_document(document)


def _all_layers(open_: Opened, blocks: Tensor, n_context: int, n_rows: int) -> Callable[[], object]:
    """The work to be timed: a captured graph of it where that works."""
    runner, model = open_.runner, open_.model
    layout = runner.layout
    backend = select_backend(layout, DEVICE)
    step = one_group(blocks, n_context, n_rows)
    q = torch.randn(n_rows, model.n_heads, layout.head_dim, device=DEVICE).to(model.dtype)
    shape = (n_rows, layout.n_kv_heads, 2 * TAIL_TOKENS, layout.head_dim)
    tail_k, tail_v = (torch.randn(shape, device=DEVICE).to(model.dtype) for _ in range(2))

    def work() -> None:
        for pool in runner.pool.layers:
            backend.attend(step, q, pool, tail_k, tail_v, model.scale)

    work()
    return captured(work) if ON_CARD else work


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """`work` as a CUDA graph, so that launches from Python do not count."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
