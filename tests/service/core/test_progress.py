"""The stages of a build as they are told."""

import pytest

from service.core.clock import FakeClock
from service.core.progress import BuildStages

PREFILLED, COMPACTED, PERSISTED = ("prefilling", 9), ("compacting", 3), ("persisting", 9)


@pytest.mark.parametrize(
    ("is_compacted", "events", "told"),
    [
        (False, [PREFILLED, PERSISTED], ["prefilling", "persisting"]),
        (True, [PREFILLED, PERSISTED, COMPACTED, PERSISTED], ["prefilling", None, "compacting", "persisting"]),
        (True, [PREFILLED, COMPACTED, PREFILLED, COMPACTED], ["prefilling", "compacting", None, "compacting"]),
        (False, [PREFILLED, PERSISTED, PREFILLED], ["prefilling", "persisting", None]),
        (False, [PREFILLED, COMPACTED, ("dreaming", 1)], ["prefilling", None, None]),
    ],
)
def test_a_build_never_goes_back_and_ends_once(is_compacted, events, told):
    stages = BuildStages(FakeClock(), is_compacted=is_compacted)
    seen = [stages.at(stage, done, 9) for stage, done in events]
    assert [progress and progress.stage for progress in seen] == told
    assert all(progress is None or progress.total == 9 for progress in seen)
