"""Measured beside predicted, and whether they agree."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.bench_report import table
from benchmarks.capacity_parts.calibrate import Calibration
from benchmarks.capacity_parts.inputs import SOURCES
from benchmarks.capacity_parts.measures import Measures

WITHIN = 0.25
POINTS = 0.05
"""A share of questions is also right when it is off by less than that of all questions: of few, one is much."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One quantity of a run. `measured` and `simulated` are of the same questions; `long_run` and `modelled` of any
    number of such questions. `is_share`: of all questions. The second pair is judged when `judges_model`."""

    name: str
    measured: float
    simulated: float
    long_run: float
    modelled: float
    is_share: bool = False
    judges_model: bool = True

    @property
    def met(self) -> bool:
        right = self._agree(self.measured, self.simulated)
        return right and (not self.judges_model or self._agree(self.long_run, self.modelled))

    def _agree(self, is_so: float, said: float) -> bool:
        near = self.is_share and abs(said - is_so) <= POINTS
        return near or abs(error(is_so, said)) <= WITHIN

    def row(self) -> tuple[str, ...]:
        """Of a table with the header `HEADER`, but for its first column."""
        form = "{:.0%}" if self.is_share else "{:.3g}"
        values = (self.measured, self.simulated, self.long_run, self.modelled)
        real, simulated, long_run, modelled = (form.format(value) for value in values)
        note = "" if self.judges_model else " (not judged)"
        return (
            self.name, real, simulated, _off(self.measured, self.simulated),
            long_run, modelled, _off(self.long_run, self.modelled) + note, "yes" if self.met else "**no**",
        )  # fmt: skip


def error(is_so: float, said: float) -> float:
    """Of what is so."""
    return said / is_so - 1 if is_so else float(said > 0)


def _off(is_so: float, said: float) -> str:
    return f"{error(is_so, said):+.0%}" if is_so else "-"


def compared(real: Measures, simulated: Measures, long_run: Measures, model: Measures) -> Iterator[Compared]:
    """Of the model's shares the first is judged: a document comes from Redis to a worker's disk once, which a long run
    sees no more. Nor are its percentiles: it knows the mean of each thing that takes time."""

    def of_all(value: Callable[[Measures], float]) -> tuple[float, float, float, float]:
        return value(real), value(simulated), value(long_run), value(model)

    yield Compared("answers a second", *of_all(lambda of: of.rate))
    yield Compared("first token, mean, s", *of_all(lambda of: of.first_mean_s))
    yield Compared("first token, p50, s", *of_all(lambda of: of.first_p50_s), judges_model=False)
    yield Compared("first token, p95, s", *of_all(lambda of: of.first_p95_s), judges_model=False)
    yield Compared("refused", *of_all(lambda of: of.refused), is_share=True)
    seen = {*real.shares, *simulated.shares}
    for source in [source for source in SOURCES if source in seen]:
        shares = of_all(lambda of, source=source: of.shares.get(source, 0.0))
        yield Compared(f"from {source}", *shares, is_share=True, judges_model=source == "resident")


def rows(workers: int, load: float, found: Sequence[Compared]) -> list[tuple[str, ...]]:
    """Of a table, with the header `HEADER`."""
    return [(f"{workers}, {load:.0%}", *one.row()) for one in found]


HEADER = (
    "workers, load", "what", "measured", "simulator", "off by", "simulator, long run", "model", "off by", "met",
)  # fmt: skip


def calibration_table(calibration: Calibration) -> str:
    """What was measured with one worker and one user."""
    of = [
        ("a step", f"{calibration.step_s * 1e3:.1f} ms"),
        ("each of its rows", f"{calibration.row_s * 1e3:.2f} ms"),
        (
            "bringing from the disk",
            f"{calibration.load_s * 1e6:.0f} µs a token and {calibration.restore_s * 1e3:.0f} ms",
        ),
        ("more from Redis", f"{calibration.redis_s * 1e3:.0f} ms"),
        ("more from the object store", f"{calibration.object_s * 1e3:.0f} ms"),
        ("to the first token beside steps", f"{calibration.api_s * 1e3:.0f} ms"),
        ("from the last token until the answer is over", f"{calibration.hold_s * 1e3:.0f} ms"),
        ("computing a document", f"{calibration.prefill_s * 1e6:.0f} µs a token"),
    ]
    return table(("with one worker and one user", "measured"), of)
