"""Decode steps as CUDA graphs: a step of a few rows is some 800 launches, and replaying them as one saves the time
between them.

A graph is captured for a number of rows and a bound on the documents' lengths; what a step has less is padding. Whose
the rows are is nothing to it: a sequence has one, or its last token and drafts behind it. Steps in which a document has
slots take graphs of their own, of the largest bound, so that others pay nothing for them. The lengths themselves, like
everything else of a step, are read on the card. All graphs share one memory pool: they never run at the same time.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from service.engine.exl2_engine.graph_sizes import CONTEXTS, ROWS, bounds
from service.engine.exl2_engine.rows import PackedStep, RowPlan, StepShape, pack, unpack

log = logging.getLogger(__name__)

Body = Callable[[PackedStep], Tensor]
"""A step's logits ``[R, vocab]`` from its tensors."""


class Captured(Protocol):
    """A step ready to run again on what its static input holds then."""

    def __call__(self) -> Tensor: ...


Capture = Callable[[Callable[[], Tensor]], Captured]


class DecodeGraphs:
    """Captured decode steps of up to `max_rows` rows, of `more_rows` in between, on documents of up to `max_tokens`
    tokens.

    `body` computes a step; `capture` makes it repeatable, on a card `CudaCapture`. What could not be captured runs as
    it is: `failure` then says why. `n_replayed` and `n_declined` count steps; those that fit no graph are declined, and
    those that do not want every row's logits.
    """

    def __init__(
        self,
        body: Body,
        capture: Capture,
        device: torch.device,
        *,
        max_rows: int,
        max_tokens: int,
        max_tail: int,
        more_rows: Sequence[int] = (),
    ) -> None:
        self._body = body
        self._capture = capture
        self._device = device
        self._max_tail = max_tail
        self._rows = sorted({*bounds(ROWS, max_rows), *more_rows})
        self._tokens = bounds(CONTEXTS, max(max_tokens, 256))
        self._steps: dict[StepShape, tuple[Tensor, Captured]] = {}
        self.failure: str | None = None
        self.n_replayed = 0
        self.n_declined = 0

    @property
    def n_graphs(self) -> int:
        return len(self._steps)

    @property
    def rows(self) -> list[int]:
        """The numbers of rows that graphs are made for."""
        return self._rows

    def capture_all(self) -> None:
        """Capture every graph; after the first that fails, none."""
        for n_rows in reversed(self._rows):
            shapes = [self._shape(n_rows, n_tokens) for n_tokens in reversed(self._tokens)]
            for shape in (shapes[0]._replace(has_slots=True), *shapes):
                if self.failure is None:
                    self._make(shape)

    def run(self, plan: RowPlan) -> Tensor | None:
        """Logits FP32 ``[n_rows, vocab]`` on the device, or None when no graph fits the step."""
        shape = self._shape_for(plan)
        step = self._steps.get(shape) if shape else None
        if shape is None or step is None:
            self.n_declined += 1
            return None
        static, replay = step
        static.copy_(pack(plan, shape, pinned=static.is_cuda), non_blocking=True)
        self.n_replayed += 1
        return replay()[: plan.n_rows]

    def _shape_for(self, plan: RowPlan) -> StepShape | None:
        if plan.n_rows != len(plan.wanted):
            return None
        tokens = max((256 * len(d.block_ids) for d in plan.documents if d), default=0)
        n_rows = next((n for n in self._rows if n >= plan.n_rows), None)
        most = self._tokens[-1:] if plan.has_slots else self._tokens
        n_tokens = next((n for n in most if n >= tokens), None)
        if n_rows is None or n_tokens is None:
            return None
        return self._shape(n_rows, n_tokens)._replace(has_slots=plan.has_slots)

    def _shape(self, n_rows: int, n_tokens: int) -> StepShape:
        return StepShape(n_rows, n_rows, -(-n_tokens // 256), n_rows, n_tokens, self._max_tail)

    def _make(self, shape: StepShape) -> None:
        static = pack(RowPlan(), shape, pinned=False).to(self._device)
        packed = unpack(static, shape)
        try:
            self._steps[shape] = static, self._capture(lambda: self._body(packed))
        except RuntimeError as error:
            self.failure = f"{type(error).__name__}: {error}"
            log.warning("decode steps run without a CUDA graph: capturing %s failed", shape, exc_info=error)


class CudaGraphStep:
    """A captured graph and its output, which the next replay overwrites."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self._output = output

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._output


class CudaCapture:
    """Captures on a stream of its own. A step runs first as it is: kernels are compiled and loaded then, and libraries
    take their workspace, none of which may happen in a capture."""

    WARM_UPS = 3

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> CudaGraphStep:
        """Raises RuntimeError when something in `work` cannot be captured."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(self.WARM_UPS):
                work()
        self._stream.synchronize()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                output = work()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own as the current one
        current.wait_stream(self._stream)
        return CudaGraphStep(graph, output)


class Repeat:
    """In place of a captured graph where there are none: does the work again. For tests of everything around it."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self._work = work

    def __call__(self) -> Tensor:
        return self._work()


def what_cannot_be_captured(parts: dict[str, Callable[[], object]], device: torch.device) -> dict[str, str]:
    """Names and errors of those parts of a step that do not go into a graph, each tried by itself."""
    capture, broken = CudaCapture(device), {}
    for name, part in parts.items():
        try:
            capture(lambda part=part: _as_tensor(part()))
        except RuntimeError as error:
            broken[name] = f"{type(error).__name__}: {error}"
    return broken


def _as_tensor(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else torch.empty(0)
