"""The product's routing over simulated workers: questions of a trace, one API process, heartbeats.

Which worker a question goes to is decided by `service.engine.fleet.roster` itself, from what it would know: states as
old as the heartbeats make them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

from benchmarks.capacity_parts.inputs import Inputs
from benchmarks.capacity_parts.sim_engine import Clock
from benchmarks.capacity_parts.sim_store import Shelf
from benchmarks.capacity_parts.sim_worker import Served, SimWorker
from benchmarks.capacity_parts.trace import Asked
from service.engine.fleet.records import WorkerState
from service.engine.fleet.roster import Roster, Wish, place_answer
from service.engine.messages import DocumentRef, EngineInfo, EngineStats

EPOCH = "1"


class Simulator:
    """`sizes`: tokens of each document; `homes`: the worker that read it, which has it on its disk. A second `run` goes
    on from where the first one ended, with the same things in memory."""

    def __init__(self, inputs: Inputs, sizes: Sequence[int], homes: Sequence[int], seed: int = 0) -> None:
        self._inputs = inputs
        self.clock = Clock()
        tiers = inputs.tiers
        self.shared = Shelf(tiers.redis_nbytes) if tiers.redis_nbytes else None
        n = inputs.fleet.workers
        self.workers = [SimWorker(self.clock, inputs, list(sizes), self.shared, number) for number in range(n)]
        self._homes = homes
        self._roster = Roster()
        self._info = _info(inputs)
        self._refs = [DocumentRef("owner", str(number)) for number in range(len(sizes))]
        self._told: dict[int, WorkerState] = {}
        self._n_admitted = 0
        self._ends = 0.0
        for document, home in enumerate(homes):
            self.workers[home].build(document)
            if self.shared is not None:
                self.shared.put(document, self.workers[home].nbytes(document))
        chance, beat = Random(seed), inputs.fleet.heartbeat_s
        for worker in self.workers:
            self._beat(worker)
            self.clock.after(chance.uniform(0, beat), lambda worker=worker: self._keep_beating(worker))
        self._look()
        self.clock.after(chance.uniform(0, beat), self._keep_looking)

    def run(self, trace: Iterable[Asked]) -> list[Served]:
        """What became of each question, in their order; a refused one has no source."""
        began, served = self.clock.now, list[Served]()
        for asked in trace:
            one = Served(began + asked.at)
            served.append(one)
            self.clock.at(one.at, lambda asked=asked, one=one: self._ask(asked, one))
            self._ends = one.at
        self.clock.run(self._ends)
        while self._n_admitted:
            self._ends += 1.0
            self.clock.run(self._ends)
        return [replace(one, at=one.at - began) for one in served]

    def _ask(self, asked: Asked, served: Served) -> None:
        if self._n_admitted >= self._inputs.fleet.queue_limit:
            return
        self._n_admitted += 1
        self.clock.after(self._inputs.fleet.api_s, lambda: self._send(asked, served))

    def _send(self, asked: Asked, served: Served) -> None:
        wish = Wish([self._refs[asked.document]], "", (str(self._homes[asked.document]),))
        chosen = place_answer(self._roster.serving, wish)
        assert chosen is not None
        self._roster.follow(chosen.life, 1)
        worker = self.workers[int(chosen.id)]
        served.worker = worker.number
        worker.answer(asked.document, asked.answer_tokens, served, lambda: self._over(chosen.life))

    def _over(self, life: tuple[str, str]) -> None:
        self._n_admitted -= 1
        self._roster.follow(life, -1)

    # What the API process knows of the workers.

    def _keep_beating(self, worker: SimWorker) -> None:
        self._beat(worker)
        self.clock.after(self._inputs.fleet.heartbeat_s, lambda: self._keep_beating(worker))

    def _keep_looking(self) -> None:
        self._look()
        self.clock.after(self._inputs.fleet.heartbeat_s, self._keep_looking)

    def _beat(self, worker: SimWorker) -> None:
        self._told[worker.number] = WorkerState(
            str(worker.number), EPOCH, self._info, ready=True, draining=False, shares=len(self.workers) > 1,
            active=worker.n_open, free_nbytes=0, heartbeat_s=self._inputs.fleet.heartbeat_s,
            stats=_stats(worker, [self._refs[document] for document in worker.documents]),
        )  # fmt: skip

    def _look(self) -> None:
        self._roster.update(self._told.values(), self.clock.now)


def _info(inputs: Inputs) -> EngineInfo:
    return EngineInfo(
        engine="fake", model_name="", compute_dtype="", kv_type="", fingerprint={}, fingerprint_digest="same",
        max_context=1 << 20, bytes_per_token=inputs.documents.kv_nbytes, block_tokens=256,
        max_batch=inputs.worker.places, pid=0,
    )  # fmt: skip


def _stats(worker: SimWorker, documents: list[DocumentRef]) -> EngineStats:
    return EngineStats(
        prefilled_tokens_total=0, decoded_tokens_total=0, steps_total=0, document_prefill_tokens_total=0, running=0,
        waiting=0, resident_documents=len(documents), resident_nbytes=int(worker.memory.nbytes),
        document_references=0, tail_slots_used=0, rss_nbytes=0, documents=documents,
    )  # fmt: skip
