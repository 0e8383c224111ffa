"""What the capacity model and its simulator are told. Everything is in seconds, bytes and tokens."""

from dataclasses import dataclass, field

SOURCES = ("resident", "host", "disk", "redis", "object", "computed")
"""Where a question finds its document, the nearest first. `computed`: nowhere, it is read again."""


@dataclass(frozen=True, slots=True)
class Documents:
    """`lengths`: pairs of a share and of tokens. `kv_nbytes`: of a token's snapshot. The n-th most popular document is
    asked about in proportion to ``n ** -zipf``. `new_daily`: documents that arrive on a day."""

    n: int
    lengths: tuple[tuple[float, int], ...]
    kv_nbytes: int
    zipf: float = 0.8
    new_daily: float = 0.0

    @property
    def tokens(self) -> float:
        """Of a document, in the mean."""
        return sum(share * tokens for share, tokens in self.lengths)


@dataclass(frozen=True, slots=True)
class Traffic:
    """`daily`: questions of a user on a day; `peak`: the busiest hour's rate over the day's mean. `answer_cv`: standard
    deviation of an answer's tokens over their mean. `kept_days`: how long a session's turns are kept."""

    users: int
    daily: float
    peak: float = 3.0
    question_tokens: int = 40
    answer_tokens: float = 200.0
    answer_cv: float = 1.0
    kept_days: float = 30.0

    @property
    def mean_rate(self) -> float:
        """Questions a second over the whole day."""
        return self.users * self.daily / 86_400

    @property
    def peak_rate(self) -> float:
        return self.mean_rate * self.peak


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine. A step takes `step_s`, and `row_s` for each row; each token of each document that is decoded on adds
    `context_s`. A question's own pass takes `prompt_s` more, and `prompt_context_s` for each token of its document; all
    answers wait for it. A document is computed in ``prefill_s * n + prefill_pair_s * n**2``.

    `host_bps` of 0: the engine computes in the machine's memory, so that there is no tier between. `restore_s`: what a
    restore takes whatever its size. `thread_share`: the part of a restore during which no step is made.
    `compute_share`: how fast a document is computed beside answers, of how fast it is alone.
    """

    places: int
    step_s: float
    row_s: float
    memory_nbytes: float
    disk_bps: float
    disk_nbytes: float = float("inf")
    context_s: float = 0.0
    prompt_s: float = 0.0
    prompt_context_s: float = 0.0
    prefill_s: float = 0.0
    prefill_pair_s: float = 0.0
    host_nbytes: float = 0.0
    host_bps: float = 0.0
    restore_s: float = 0.0
    thread_share: float = 1.0
    compute_share: float = 1.0
    hold_s: float = 0.0
    """How long an answer keeps its place after its last token: its turn is stored."""

    def compute_s(self, tokens: float) -> float:
        """To read a document of so many tokens."""
        return self.prefill_s * tokens + self.prefill_pair_s * tokens**2


@dataclass(frozen=True, slots=True)
class Tiers:
    """Beyond the workers' disks. A tier takes `*_s` whatever the size. Bytes of 0: there is no such tier."""

    redis_nbytes: float = 0.0
    redis_bps: float = 600e6
    redis_s: float = 0.0
    redis_ttl_s: float = 86_400.0
    object_nbytes: float = float("inf")
    object_bps: float = 2.5e9
    object_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Fleet:
    """`workers` of one kind. `api_s`: what is added to the first token outside the engines; `queue_limit`: answers that
    all API processes together let run and wait."""

    workers: int
    api_s: float = 0.02
    heartbeat_s: float = 1.0
    queue_limit: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Inputs:
    """All of a question to the model."""

    documents: Documents
    traffic: Traffic
    worker: Worker
    fleet: Fleet
    tiers: Tiers = field(default_factory=Tiers)

    @property
    def turn_nbytes(self) -> float:
        """Of a turn that is kept."""
        return (self.traffic.question_tokens + self.traffic.answer_tokens) * self.documents.kv_nbytes

    def pays(self, source: str, tokens: float) -> bool:
        """Whether a tier brings a document to the disk sooner than it is computed, when nothing else is done."""
        there = {"redis": self.tiers.redis_nbytes, "object": self.tiers.object_nbytes}.get(source, 0.0)
        beyond_s = self.bring_s(source, tokens) - self.bring_s("disk", tokens)
        return bool(there) and beyond_s < self.worker.compute_s(tokens)

    def bring_s(self, source: str, tokens: float) -> float:
        """From a source to where the engine computes, when nothing else is done meanwhile."""
        worker, tiers, nbytes = self.worker, self.tiers, tokens * self.documents.kv_nbytes
        disk = worker.restore_s + nbytes / worker.disk_bps
        match source:
            case "resident":
                return 0.0
            case "host":
                return worker.restore_s + (nbytes / worker.host_bps if worker.host_bps else 0.0)
            case "disk":
                return disk
            case "redis":
                return disk + tiers.redis_s + nbytes / tiers.redis_bps
            case "object":
                return disk + tiers.object_s + nbytes / tiers.object_bps
            case _:
                return worker.compute_s(tokens) / worker.compute_share
