"""What a run measured, as it is kept in a file, and two runs side by side."""

import math
import statistics
from pathlib import Path

import msgspec

from service.errors import Invalid

FORMAT = 1


class Row(msgspec.Struct, frozen=True):
    """One figure. `value` is the median of `samples`. `nbytes`: what has to be read or moved for it once, a step of
    decode or a restore; `gbps`: that a second; `bound`: what memory, products or the tier allow, in the same unit; 0
    where nothing is known. `flops`: operations of it, of what the roofline shows."""

    name: str
    unit: str
    samples: list[float]
    higher_is_better: bool = True
    nbytes: float = 0.0
    gbps: float = 0.0
    bound: float = 0.0
    flops: float = 0.0

    @property
    def value(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> str:
        return f"{min(self.samples):.3g}-{max(self.samples):.3g}"

    @property
    def share(self) -> float:
        """Of the bound, 1 at it; 0 where there is none."""
        if not self.bound or not self.value:
            return 0.0
        return self.value / self.bound if self.higher_is_better else self.bound / self.value


class LeftOut(msgspec.Struct, frozen=True):
    """What was not measured, and why."""

    name: str
    why: str


class Run(msgspec.Struct, frozen=True):
    """A run: where and what (`place`), the ceilings it is held against, its rows, and what is not among them. `at`: ISO
    8601, UTC."""

    format: int
    at: str
    place: dict[str, str]
    bandwidth_gbps: float
    tflops: float
    rows: list[Row]
    left_out: list[LeftOut] = []


class Change(msgspec.Struct, frozen=True):
    """A row of two runs. `better_by`: share by which the later one is better; below 0 it is worse. None, as `now` is,
    for a row that only the earlier one has."""

    name: str
    unit: str
    before: float
    now: float | None
    better_by: float | None

    def worse_than(self, share: float) -> bool:
        """Whether by more than this share. What is not known is not worse."""
        return self.better_by is not None and self.better_by < -share


def run_bytes(run: Run) -> bytes:
    """What `load_run` reads in a file."""
    return msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n"


class _Format(msgspec.Struct):
    format: int


def load_run(path: Path) -> Run:
    """Raises OSError, and Invalid for a file that is no run, or of another format."""
    content = path.read_bytes()
    try:
        # Another format may have other fields.
        found = msgspec.json.decode(content, type=_Format).format
        if found != FORMAT:
            raise Invalid(f"{path} has format {found}, this program reads {FORMAT}: measure again.", param="against")
        run = msgspec.json.decode(content, type=Run)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"{path} is not a file of `preread bench`: {error}.", param="against") from None
    for row in run.rows:
        if not row.samples or not all(math.isfinite(value) and value >= 0 for value in row.samples):
            why = f"{row.name!r} has no samples, or some that mean nothing"
            raise Invalid(f"{path} is not a file of `preread bench`: {why}.", param="against")
    return run


def compare(before: Run, now: Run) -> list[Change]:
    """Rows that both runs have, and then those that are missing now."""
    earlier = {row.name: row for row in before.rows}
    gone = earlier.keys() - {row.name for row in now.rows}
    both = [_change(earlier[row.name], row) for row in now.rows if row.name in earlier]
    return both + [Change(row.name, row.unit, row.value, None, None) for row in before.rows if row.name in gone]


def _change(before: Row, now: Row) -> Change:
    ratio = now.value / before.value if before.value else 1.0
    better = ratio if now.higher_is_better else 1 / ratio if ratio else 1.0
    return Change(now.name, now.unit, before.value, now.value, better - 1)


def differences(before: Run, now: Run) -> list[str]:
    """What else is different: two machines or settings are not compared in silence."""
    names = sorted(before.place.keys() | now.place.keys())
    pairs = ((name, before.place.get(name, ""), now.place.get(name, "")) for name in names)
    return [f"{name}: {old or 'nothing'} before, {new or 'nothing'} now" for name, old, new in pairs if old != new]
