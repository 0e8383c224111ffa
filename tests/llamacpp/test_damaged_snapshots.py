"""The torch engine's damages, on llama.cpp: a damaged state never reaches its reader, and the answer is right."""

from typing import Any

import pytest

from tests.e2e.damage import MANY, Damage
from tests.e2e.damaged import Case, Damaged, expect_right_and_tidy, story
from tests.e2e.server import files_below
from tests.e2e.test_damaged_snapshots import (  # noqa: F401 - collected here, with the fixtures below
    test_a_turn_whose_kv_is_damaged_is_computed_again_and_the_answer_stays,
    turns,
)

pytestmark = pytest.mark.timeout(900)
ONE_SHARD = [damage for damage in MANY if not damage.large]
"""`tests/cache_store` has the others; documents of two shards would be read for minutes."""


@pytest.fixture(scope="module")
def fake_cases(serve_all, of_llama: dict[str, Any]) -> dict[str, Case]:
    """Not of the fake engine here; the name is that of the tests which are the same."""
    server = serve_all(**of_llama)
    damaged = Damaged(server, ONE_SHARD, [story(n, 12) for n in range(len(ONE_SHARD))])
    server.stop()
    damaged.apply()
    server.start()
    return damaged.ask_again()


@pytest.mark.parametrize("damage", ONE_SHARD, ids=lambda damage: damage.name)
def test_the_answer_is_the_one_from_before_the_damage(fake_cases, damage: Damage):
    expect_right_and_tidy(fake_cases[damage.name], damage)


def test_nothing_is_left_over_and_every_snapshot_is_whole_again(fake_cases, turns):  # noqa: F811 - the fixture
    for name in ("building", "trash", "locks"):
        assert files_below(turns.case.server.store / name) == []
    assert len(turns.verdicts) > len(ONE_SHARD)
    assert [verdict for verdict in turns.verdicts if not verdict.ok] == []
