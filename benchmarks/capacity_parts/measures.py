"""What is compared of a run, real or simulated."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.capacity_parts.sim_worker import Served


@dataclass(frozen=True, slots=True)
class Measures:
    """`rate`: answers that began a second; `shares`: of answers by source; `refused`: a share of questions."""

    rate: float
    first_p50_s: float
    first_p95_s: float
    shares: dict[str, float]
    refused: float
    first_mean_s: float = 0.0


def measured(served: Sequence[Served], seconds: float, skip_s: float = 0.0) -> Measures:
    """Of questions asked from `skip_s` to `seconds`. The rate counts the answers that ended in that time."""
    asked = [one for one in served if skip_s <= one.at < seconds]
    answered = [one for one in asked if one.source]
    firsts = sorted(one.first_s for one in answered)
    ended = sum(skip_s <= one.at + one.total_s < seconds for one in served if one.source)
    counts = Counter(one.source for one in answered)
    return Measures(
        rate=ended / (seconds - skip_s),
        first_p50_s=quantile(firsts, 0.5),
        first_p95_s=quantile(firsts, 0.95),
        shares={source: n / len(answered) for source, n in counts.items()},
        refused=1 - len(answered) / max(len(asked), 1),
        first_mean_s=sum(firsts) / max(len(firsts), 1),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in order; 0 of none."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
