"""A simulated worker: places, documents in memory, on its disk and beyond, and its engine; as `service.engine.host`."""

from collections import defaultdict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

from benchmarks.capacity_parts.inputs import Inputs
from benchmarks.capacity_parts.sim_engine import Clock, Engine, Sequence, Then
from benchmarks.capacity_parts.sim_store import Shelf

Pause = Callable[[Then], object]
"""Something an answer waits for: called with what goes on then."""


@dataclass(slots=True)
class Served:
    """A question that was answered, or refused (`source` is empty). Seconds are since it was asked."""

    at: float
    source: str = ""
    first_s: float = 0.0
    total_s: float = 0.0
    worker: int = -1


class SimWorker:
    """`sizes` are the documents' tokens. `shared` is the Redis tier. All are in the object tier, if there is one."""

    def __init__(self, clock: Clock, inputs: Inputs, sizes: list[int], shared: Shelf | None, number: int) -> None:
        self.number = number
        self.n_open = 0
        self._clock = clock
        self._inputs = inputs
        self._sizes = sizes
        self._shared = shared
        self.engine = Engine(clock, inputs.worker)
        self.host = Shelf(inputs.worker.host_nbytes if inputs.worker.host_bps else 0.0)
        self.memory = Shelf(inputs.worker.memory_nbytes, self._move_out)
        self.disk = Shelf(inputs.worker.disk_nbytes)
        self._loading: dict[int, list[Then]] = {}
        self._unverified: set[int] = set()
        self._free = inputs.worker.places
        self._line: deque[Then] = deque()
        self._short: list[Then] = []
        self.brought: dict[str, int] = defaultdict(int)

    def build(self, document: int) -> None:
        """A document was read here."""
        self.disk.put(document, self.nbytes(document))
        self.memory.put(document, self.nbytes(document))

    def nbytes(self, document: int) -> float:
        return self._sizes[document] * self._inputs.documents.kv_nbytes

    @property
    def documents(self) -> set[int]:
        """Those in memory, or on their way."""
        return {*self.memory, *self.host, *self._loading}

    def answer(self, document: int, tokens: int, served: Served, over: Then) -> None:
        """Take a question; `served` is filled, and `over` called when its place is free again."""
        self.n_open += 1
        steps = self._answer(document, tokens, served, over)
        self._go(steps)

    def _go(self, steps: Generator[Pause, None, None]) -> None:
        pause = next(steps, None)
        if pause is not None:
            pause(lambda: self._go(steps))

    def _answer(self, document: int, tokens: int, served: Served, over: Then) -> Generator[Pause, None, None]:
        worker, question = self._inputs.worker, self._inputs.traffic.question_tokens
        yield self._place
        self.disk.touch(document)
        served.source = "resident"
        while document in self._loading or document not in self.memory:
            yield from self._opened(document, served)
        self.memory.use(document)
        yield self._call(0.0)
        canary = document in self._unverified
        ended = list[Then]()

        def first() -> None:
            served.first_s = self._clock.now - served.at
            self._unverified.discard(document)

        sequence = Sequence(
            document, self._sizes[document], question + 1, tokens, canary, first, lambda: [then() for then in ended]
        )
        yield lambda then: (ended.append(then), self.engine.submit(sequence))
        served.total_s = self._clock.now - served.at
        yield self._call(0.0)
        yield lambda then: self._clock.after(worker.hold_s, then)
        self.memory.leave(document)
        self.n_open -= 1
        self._leave()
        over()

    def _place(self, then: Then) -> None:
        if self._free:
            self._free -= 1
            self._clock.after(0, then)
        else:
            self._line.append(then)

    def _leave(self) -> None:
        if self._line:
            self._clock.after(0, self._line.popleft())
        else:
            self._free += 1
        short, self._short = self._short, []
        for then in short:
            self._clock.after(0, then)

    def _call(self, seconds: float) -> Pause:
        return lambda then: self.engine.call(seconds, then)

    def _opened(self, document: int, served: Served) -> Generator[Pause, None, None]:
        """Wait for who loads it, for room, or load it."""
        if document in self._loading:
            yield self._loading[document].append
        elif self.memory.put(document, self.nbytes(document)):
            yield from self._restore(document, served)
        else:
            yield self._short.append

    def _restore(self, document: int, served: Served) -> Generator[Pause, None, None]:
        inputs, tokens, nbytes = self._inputs, self._sizes[document], self.nbytes(document)
        waiting = self._loading[document] = list[Then]()
        self.memory.use(document)
        source = served.source = self._source(document)
        self.brought[source] += 1
        near = "host" if source == "host" else "disk"
        beyond = max(inputs.bring_s(source, tokens) - inputs.bring_s(near, tokens), 0.0)
        here = inputs.bring_s(near, tokens) - inputs.worker.restore_s
        on_thread = here * inputs.worker.thread_share
        yield lambda then: self._clock.after(beyond + inputs.worker.restore_s + here - on_thread, then)
        yield self._call(0.0)
        yield self._call(on_thread)
        yield self._call(0.0)
        self.disk.put(document, nbytes)
        self._unverified.add(document)
        self.memory.leave(document)
        del self._loading[document]
        for then in waiting:
            self._clock.after(0, then)

    def _source(self, document: int) -> str:
        """Where it is brought from; nowhere when it is computed sooner."""
        if document in self.host:
            return "host"
        if document in self.disk:
            return "disk"
        in_shared = self._shared is not None and document in self._shared
        tokens = self._sizes[document]
        if in_shared and self._inputs.pays("redis", tokens):
            source = "redis"
        else:
            source = "object" if self._inputs.pays("object", tokens) else "computed"
        if self._shared is not None:
            self._shared.put(document, self.nbytes(document))
        return source

    def _move_out(self, document: int) -> None:
        if self._inputs.worker.host_bps:
            self.host.put(document, self.nbytes(document))
