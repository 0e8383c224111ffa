"""Snapshots damaged between a stop and a start: always the right answer, the right reason, and order after it.

Here through the whole service; `tests/cache_store` has every kind of damage at every place.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from cache_store.inventory import Verdict
from cache_store.store import SnapshotStore
from tests.e2e.damage import FEW, MANY, Damage
from tests.e2e.damaged import MAX_TOKENS, QUESTION, Case, Damaged, expect_right_and_tidy, story
from tests.e2e.server import Server, files_below

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fake_cases(serve_all, demo_model: Path) -> dict[str, Case]:
    """Answers of this engine hash every byte of the KV they build on."""
    fake = {"model_dir": str(demo_model), "fake_layers": 120, "fake_chunk_tokens": 512}
    texts = [story(n, 350 if damage.large else 12) for n, damage in enumerate(MANY)]
    server: Server = serve_all(fake=fake, kv_type="fp16")
    damaged = Damaged(server, MANY, texts)
    server.stop()
    damaged.apply()
    server.start()
    return damaged.ask_again()


@pytest.mark.parametrize("damage", MANY, ids=lambda damage: damage.name)
def test_an_engine_whose_answers_hash_its_kv_answers_the_same(fake_cases, damage: Damage):
    expect_right_and_tidy(fake_cases[damage.name], damage)


@dataclass
class Turns:
    """Sessions that asked the same of one document. Then the server was stopped, its store checked, and the KV of
    two turns damaged."""

    case: Case
    flipped: str
    missing: str
    whole: str
    first: str
    verdicts: list[Verdict]


@pytest.fixture(scope="module")
def turns(fake_cases) -> Turns:
    case = fake_cases["newer format version"]
    server = case.server
    flipped, missing, whole = (server.session(case.document["id"]) for _ in range(3))
    (first,) = {server.ask(one, QUESTION, max_tokens=9)["answer"] for one in (flipped, missing, whole)}
    turn_ids = [server.turns(one)[0]["id"] for one in (flipped, missing)]
    server.stop()
    verdicts = SnapshotStore(server.store).verify()
    directories = [next((server.store / "snapshots").glob(f"*/turns/{turn_id}/*")) for turn_id in turn_ids]
    FEW[0].apply(directories[0], directories[0])
    next(directories[1].glob("shard-*")).unlink()
    server.start()
    return Turns(case, flipped, missing, whole, first, verdicts)


def test_nothing_is_left_over_and_every_snapshot_is_whole_again(fake_cases, turns: Turns):
    server = turns.case.server
    for name in ("building", "trash", "locks"):
        assert files_below(server.store / name) == []
    assert len(turns.verdicts) > len(MANY)
    assert [verdict for verdict in turns.verdicts if not verdict.ok] == []
    case = fake_cases["shards swapped"]
    answer = server.ask(server.session(case.document["id"]), QUESTION, max_tokens=MAX_TOKENS)
    assert (answer["answer"], answer["cache"]["source"]) == (case.before["answer"], "disk")
    assert answer["usage"]["reused_tokens"] == case.document["token_count"]


def test_a_turn_whose_kv_is_damaged_is_computed_again_and_the_answer_stays(turns: Turns):
    server, follow_up = turns.case.server, "And since when?"
    expected = server.ask(turns.whole, follow_up, max_tokens=9)
    assert expected["cache"]["miss_reason"] is None
    for damaged, reason in ((turns.flipped, "checksum"), (turns.missing, "truncated")):
        answer = server.ask(damaged, follow_up, max_tokens=9)
        assert answer["answer"] == expected["answer"] != turns.first
        assert answer["cache"]["miss_reason"] == reason
        assert answer["usage"]["prefilled_tokens"] > expected["usage"]["prefilled_tokens"]
        assert answer["usage"]["reused_tokens"] == turns.case.document["token_count"]
