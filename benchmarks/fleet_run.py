"""Workers and API processes on one machine under many clients: is every answer right, and who gave it?

    python -m benchmarks.fleet_run                      the model that `preread` finds, FP32, ten minutes
    python -m benchmarks.fleet_run --fake               an engine whose answers hash every byte of the stored KV
    python -m benchmarks.fleet_run --fake --minutes 1 --clients 8 --workers 2 --json result.json

Real PostgreSQL, Redis and S3 server (moto), `--workers` times `preread worker`, `--apis` times `preread serve`. First a
single node answers all questions. Then the documents are uploaded, some at all API processes at once, and the clients
ask streamed questions, leave in the middle of answers and take them up again at another API process. Prints a table,
and ends with status 1 when a target is missed.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.bench_report import machine, table
from benchmarks.fleet_clients import Chat, Client, Tally
from service.engine.fleet import keys
from service.engine.fleet.records import WorkerState, decode_state
from service.settings import Settings
from tests.chaos.world import World
from tests.e2e.server import Server, until

WORDS = ("keeper", "lamp", "tower", "harbour", "storm", "ledger", "lens", "oil", "stair", "signal", "boat", "winter")
QUESTIONS = ("Who keeps the lamp?", "And since when?", "What does the ledger say?", "How often was there a storm?")
LEAST_HAD = 0.9
HEARTBEAT_S = 2.0
"""Longer than by default: on one machine that all processes share, a worker may not run for a while."""
CHATS = 2
TURNS = 2


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients do."""

    clients: int = 40
    documents: int = 20
    words: int = 150
    max_tokens: int = 24
    think_s: float = 1.0
    seed: int = 1
    elsewhere: bool = True


@dataclass
class Result:
    """What a run gave. `prefilled`: by worker, tokens of documents that it computed; `tokens`: of all documents."""

    n_workers: int
    n_apis: int
    engine: str
    max_batch: int
    load: Load
    seconds: float = 0.0
    read_s: float = 0.0
    tokens: int = 0
    prefilled: dict[str, int] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    def checks(self) -> list[tuple[str, str, str, bool]]:
        """What was looked at: its name, figure, target, and whether that is met."""
        tally, prefilled = self.tally, sum(self.prefilled.values())
        breaks = sum(answer.breaks for answer in tally.answers)
        return [
            ("questions answered", str(len(tally.answers)), "at least one", bool(tally.answers)),
            ("streams left and taken up again", str(breaks), "at least one", breaks > 0),
            ("wrong, lost or doubled tokens", str(len(tally.wrong)), "none", not tally.wrong),
            ("answers that ended with an error", str(len(tally.errors)), "none", not tally.errors),
            ("tokens of documents computed", f"{prefilled} of {self.tokens}", "each once", prefilled == self.tokens),
            (
                "answered where the document was",
                f"{tally.share_had:.1%}",
                "at least 90 %",
                tally.share_had >= LEAST_HAD,
            ),
        ]

    def figures(self) -> dict[str, float]:
        """What is measured and has no target; empty without an answer."""
        answers = self.tally.answers
        if not answers:
            return {}
        firsts = sorted(answer.first_s for answer in answers if not answer.breaks)
        totals = [answer.total_s for answer in answers if not answer.breaks]
        return {
            "questions_per_s": len(answers) / self.seconds,
            "tokens_per_s": sum(answer.tokens for answer in answers) / self.seconds,
            "first_token_p50_s": statistics.median(firsts) if firsts else 0.0,
            "first_token_mean_s": statistics.fmean(firsts) if firsts else 0.0,
            "first_token_p99_s": firsts[int(0.99 * len(firsts))] if firsts else 0.0,
            "answer_mean_s": statistics.fmean(totals) if totals else 0.0,
            "waits": self.tally.waits,
            "documents_read_s": self.read_s,
        }

    def as_json(self) -> dict[str, Any]:
        own = asdict(self)
        del own["tally"]
        missed = [name for name, _, _, met in self.checks() if not met]
        wrong = {"wrong": self.tally.wrong, "errors": self.tally.errors, "missed": missed}
        return own | self.figures() | wrong | {"machine": machine(), "share_had": self.tally.share_had}


def documents_of(load: Load) -> list[bytes]:
    """Texts that differ from the first word on."""
    chance = Random(load.seed)
    return [
        f"Document {n} of {chance.getrandbits(32):x}. {' '.join(chance.choices(WORDS, k=load.words))}.".encode()
        for n in range(load.documents)
    ]


def answers_of(reference: Server, contents: Sequence[bytes], load: Load) -> list[list[tuple[tuple[str, str], ...]]]:
    """By document the chats with what a single node answers."""
    return [_chats(reference, content, load) for content in contents]


def _chats(reference: Server, content: bytes, load: Load) -> list[tuple[tuple[str, str], ...]]:
    document, chats = reference.ready(content)["id"], []
    for n in range(CHATS):
        session = reference.session(document)
        texts = [QUESTIONS[(n * TURNS + turn) % len(QUESTIONS)] for turn in range(TURNS)]
        chats.append(
            tuple((text, reference.ask(session, text, max_tokens=load.max_tokens)["answer"]) for text in texts)
        )
    return chats


def upload(apis: Sequence[Server], contents: Sequence[bytes]) -> list[dict[str, Any]]:
    """The documents once they are read. Each goes to one API process in turn, every fourth to all at once."""
    jobs = [
        (n, api) for n, content in enumerate(contents) for m, api in enumerate(apis) if not n % 4 or m == n % len(apis)
    ]
    with ThreadPoolExecutor(2 * len(apis)) as pool:
        ids = dict(pool.map(lambda job: (job[0], job[1].upload(contents[job[0]])["id"]), jobs))
    bodies = [apis[n % len(apis)].until_ended(ids[n], within_s=1800) for n in range(len(contents))]
    assert all(body["status"] == "ready" for body in bodies), bodies
    return bodies


def workers_of(world: World) -> list[WorkerState]:
    """What the workers said last."""
    client: Any = world.redis.client()
    values = [client.hget(keys.worker(worker.id), "state") for worker in world.workers]
    client.close()
    return [decode_state(value) for value in values if value]


def prefilled(world: World) -> dict[str, int]:
    """Tokens of documents that each worker computed since it started."""
    return {state.worker_id: state.stats.document_prefill_tokens_total for state in workers_of(world) if state.stats}


def measure(world: World, seconds: float, load: Load, result: Result) -> Result:
    """Read the documents and let the clients ask. The world runs, and its reference is stopped on the way."""
    contents = documents_of(load)
    right = answers_of(world.reference, contents, load)
    world.reference.stop()
    began = time.monotonic()
    bodies = upload(world.apis, contents)
    result.read_s = time.monotonic() - began
    result.tokens = sum(body["token_count"] for body in bodies)
    chats = [Chat(body["id"], turns) for body, of in zip(bodies, right, strict=True) for turns in of]
    ask(world.apis, chats, seconds, load, result)
    until(lambda: sum(prefilled(world).values()) >= result.tokens, "tokens were not computed", 30, every_s=0.2)
    time.sleep(2 * float(world.workers[0].settings["fleet_heartbeat_s"]))  # what was computed twice is told by then
    result.prefilled = prefilled(world)
    return result


def ask(apis: Sequence[Server], chats: Sequence[Chat], seconds: float, load: Load, result: Result) -> None:
    stop, began = threading.Event(), time.monotonic()
    clients = [
        Client(
            apis,
            result.tally,
            load.seed + n,
            max_tokens=load.max_tokens,
            think_s=load.think_s,
            elsewhere=load.elsewhere,
        )
        for n in range(load.clients)
    ]
    with ThreadPoolExecutor(load.clients) as pool:
        for running in [pool.submit(client.run, chats, began + seconds, stop) for client in clients]:
            running.result()
    result.seconds = time.monotonic() - began


def report(result: Result) -> str:
    """The run for people."""
    rows = [(name, figure, target, "yes" if met else "**no**") for name, figure, target, met in result.checks()]
    rows += [(name, f"{value:.4g}", "", "") for name, value in result.figures().items()]
    rows += [(f"computed by {worker}", f"{tokens} tokens", "", "") for worker, tokens in result.prefilled.items()]
    load = result.load
    what = (
        f"{result.n_workers} workers ({result.engine}), {result.n_apis} API processes, {load.clients} clients, "
        f"{load.documents} documents, {result.seconds:.0f} s"
    )
    faults = list(dict.fromkeys([*result.tally.wrong, *result.tally.errors]))[:10]
    return "\n".join([f"{machine()}.", f"{what}.", "", table(("what", "figure", "target", "met"), rows), *faults])


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--words", type=int, default=150, help="of each document")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--think", type=float, default=1.0, help="mean seconds between an answer and the next question")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--apis", type=int, default=2)
    parser.add_argument("--max-batch", type=int, default=4, help="answers that a worker computes at once")
    parser.add_argument("--model", default="", help="an imported model's directory; else the one `preread` finds")
    parser.add_argument("--fake", action="store_true", help="no model: answers that hash the stored KV")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a step of the fake engine")
    parser.add_argument("--same-api", action="store_true", help="streams are taken up where they were left")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> int:
    chosen = options().parse_args()
    model = "" if chosen.fake else chosen.model or str(Settings().model_dir)
    load = Load(
        chosen.clients, chosen.documents, chosen.words, chosen.max_tokens, chosen.think, elsewhere=not chosen.same_api
    )
    result = Result(chosen.workers, chosen.apis, model or "fake", chosen.max_batch, load)
    fake = {"fake_from_kv": True, "fake_layer_s": 0.005, "fake_step_s": chosen.step}
    settings = {
        "fleet_heartbeat_s": HEARTBEAT_S, "lease_s": 10, "disconnect_grace_s": 60, "log_level": "warning",
        "queue_limit": load.clients + 8, "max_batch": chosen.max_batch,
    }  # fmt: skip
    sizes = {"n_apis": chosen.apis, "n_workers": chosen.workers}
    with tempfile.TemporaryDirectory(prefix="preread-fleet-") as name:
        with World(Path(name), **sizes, model=model, fake=fake, **settings) as world:
            measure(world, chosen.minutes * 60, load, result)
    print(report(result))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(result.as_json(), indent=2) + "\n")
    return int(not all(met for *_, met in result.checks()))


if __name__ == "__main__":
    sys.exit(main())
