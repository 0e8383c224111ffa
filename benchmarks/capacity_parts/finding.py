"""Where questions find their documents: in the memory of the worker they go to, on its disk, beyond, or nowhere."""

import numpy as np

from benchmarks.capacity_parts.holders import Held, Popularity, Vector, held
from benchmarks.capacity_parts.inputs import Inputs
from benchmarks.capacity_parts.queueing import worker
from service.engine.fleet.roster import PLACES_FOR_ONE_MORE

LONGEST_S = 1e12


def patience(places: int) -> int:
    """Questions that may wait at a worker before it is crowded."""
    return places // PLACES_FOR_ONE_MORE


class Finding:
    """Of one set of inputs. `served`: questions a second; `taken`: the share of places that is."""

    def __init__(self, inputs: Inputs) -> None:
        self._in = inputs
        self._popularity = Popularity.zipf(inputs.documents.n, inputs.documents.zipf)
        self._of_all = self._popularity.share * self._popularity.count
        self._nbytes = inputs.documents.tokens * inputs.documents.kv_nbytes

    def found(self, served: float, place_s: float, taken: float) -> Held:
        """A popular document fills its own holders, beside what everything else does."""
        places, fleet = self._in.worker.places, self._in.fleet
        rates = self._popularity.share * served
        own, background = rates * place_s, taken * places
        elsewhere = worker(places, patience(places), background)

        def spill(h: int) -> Vector:
            at_holders = np.where(own > 0.2 * places, background + own / h, background)
            crowded = worker(places, patience(places), np.minimum(at_holders, places)).crowded
            return crowded**h * (1 - float(elsewhere.full) ** (fleet.workers - h))

        room = (self._in.worker.memory_nbytes + self._in.worker.host_nbytes) / self._nbytes * fleet.workers
        return held(rates, self._popularity.count, fleet.workers, room, spill)

    def shares(self, found: Held, served: float) -> dict[str, float]:
        """By source. What is not in memory is on the disk of the worker that read it, when it goes there, or else on
        that of one that had it before."""
        of_all = self._of_all
        resident = float((of_all * found.here).sum())
        missed = found.away + found.copied
        on_disk, far_rate = self._on_disk(found, served)
        far = missed * (1 - on_disk)
        in_redis = self._in_redis(far_rate, served)
        redis = float((of_all * far * in_redis).sum())
        beyond = float((of_all * far).sum()) - redis
        on_card = self._on_card(resident)
        near = redis * self._share_that("redis")
        away = beyond * self._share_that("object") + redis * self._share_that("object", but_not="redis")
        return {
            "resident": resident * on_card,
            "host": resident * (1 - on_card),
            "disk": float((of_all * missed * on_disk).sum()),
            "redis": near,
            "object": away,
            "computed": redis + beyond - near - away,
        }

    def _share_that(self, pays: str, but_not: str = "") -> float:
        """The share of documents that come from a tier sooner than they are computed, and not from another one."""
        lengths = self._in.documents.lengths
        return sum(share for share, n in lengths if self._in.pays(pays, n) and not self._in.pays(but_not, n))

    def _on_card(self, resident: float) -> float:
        """Of what is in memory, the share that need not come from the machine's: the same popularity over less room."""
        if not self._in.worker.host_bps or not resident:
            return 1.0
        room = self._in.worker.memory_nbytes / self._nbytes * self._in.fleet.workers
        near = held(self._popularity.share, self._popularity.count, 1, room, lambda _: 0.0)
        share = float((self._popularity.share * self._popularity.count * near.here).sum())
        return min(share / resident, 1.0)

    def _on_disk(self, found: Held, served: float) -> tuple[Vector, Vector]:
        """By group: the probability that the worker to which a question goes has its document on the disk, and how
        often a second it is brought from beyond."""
        fleet, rates = self._in.fleet, self._popularity.share * served
        room = self._in.worker.disk_nbytes / self._nbytes * fleet.workers
        if room >= self._popularity.count.sum() * fleet.workers:
            return np.ones_like(rates), np.zeros_like(rates)
        low, high = 1.0, LONGEST_S
        for _ in range(60):
            lasting = (low * high) ** 0.5
            copies = self._disk_copies(found, rates, lasting)
            low, high = (lasting, high) if (self._popularity.count * copies).sum() < room else (low, lasting)
        there = -np.expm1(-rates * max(low - found.lasting_s, 0.0))
        copied = self._copy_there(found, rates, low)
        on_disk = (found.away * there + found.copied * copied) / np.maximum(found.away + found.copied, 1e-300)
        return on_disk, rates * (found.away + found.copied) * (1 - on_disk)

    def _disk_copies(self, found: Held, rates: Vector, lasting: float) -> Vector:
        return -np.expm1(-rates * lasting) + (self._in.fleet.workers - 1) * self._copy_there(found, rates, lasting)

    def _copy_there(self, found: Held, rates: Vector, lasting: float) -> Vector:
        """The probability that a worker which did not read a document has had it lately."""
        return -np.expm1(-rates * found.copied * lasting / max(self._in.fleet.workers - 1, 1))

    def _in_redis(self, far_rate: Vector, served: float) -> Vector:
        """Redis knows only of what is brought from it: its memory is an LRU of that, of new documents, and of turns."""
        tiers = self._in.tiers
        turns_bps = served * self._in.turn_nbytes + self._in.documents.new_daily / 86_400 * self._nbytes
        low, high = 1e-3, tiers.redis_ttl_s
        for _ in range(60):
            lasting = (low * high) ** 0.5
            held_nbytes = float((self._popularity.count * -np.expm1(-far_rate * lasting)).sum()) * self._nbytes
            fits = held_nbytes + turns_bps * lasting < tiers.redis_nbytes
            low, high = (lasting, high) if fits else (low, lasting)
        return -np.expm1(-far_rate * low)

    def copies(self, found: Held) -> float:
        """Holders of a document that has one, in the mean."""
        count = self._popularity.count
        return float((count * found.copies).sum() / max(float((count * (1 - found.away)).sum()), 1e-9))
