"""Snapshots damaged between a stop and a start: always the right answer, the right reason, and order after it.

Here through the whole service; `tests/cache_store` has every kind of damage at every place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cache_store.store import SnapshotStore
from tests.e2e.damage import FEW, MANY, Damage
from tests.e2e.server import Server, files_below

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
QUESTION = "Who keeps the lighthouse?"
MODEL_DAMAGES = FEW[::2]
"""Some of each sort: what is read again does not depend on what the model computes."""
MAX_TOKENS = 16
KEEPERS = ["Ada Brun", "Tom Quill", "Ida Marsh", "Ben Oakes", "Eve Stroud", "Max Tolley", "Una Wick", "Sam Yarrow"]


@dataclass
class Case:
    """A document, an answer about it before the damage, and one from after it with the document as it is then."""

    server: Server
    document: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]
    rebuilt: dict[str, Any]


def suffer(server: Server, damages: Sequence[Damage], texts: Sequence[str]) -> dict[str, Case]:
    """One document for each damage; all are damaged while the server is stopped."""
    documents = [server.ready(text.encode()) for text in texts]
    other = server.ready(texts[-1].replace("lighthouse", "mill").encode())
    ask = {"text": QUESTION, "max_tokens": MAX_TOKENS}
    before = [server.ask(server.session(document["id"]), **ask) for document in documents]
    server.stop()
    for damage, document in zip(damages, documents, strict=True):
        damage.apply(directory_of(server, document["id"]), directory_of(server, other["id"]))
    server.start()
    cases = {}
    for damage, document, answer in zip(damages, documents, before, strict=True):
        after = server.ask(server.session(document["id"]), **ask)
        cases[damage.name] = Case(server, document, answer, after, server.document(document["id"]))
    return cases


def directory_of(server: Server, document_id: str) -> Path:
    (directory,) = (server.store / "snapshots").glob(f"*/documents/{document_id}/*")
    return directory


def expect_right_and_tidy(case: Case, damage: Damage) -> None:
    server, tokens = case.server, case.document["token_count"]
    assert case.after["answer"] == case.before["answer"]
    assert (case.after["cache"]["miss_reason"], case.after["cache"]["source"]) == (damage.reason, "none")
    usage = case.after["usage"]
    assert (usage["document_tokens"], usage["reused_tokens"]) == (tokens, 0)
    assert tokens < usage["prefilled_tokens"] < tokens + 40
    assert case.rebuilt["status"] == "ready"
    assert case.rebuilt["snapshot"]["state"] == "ready"
    again = server.ask(server.session(case.document["id"]), QUESTION, max_tokens=MAX_TOKENS)
    assert (again["answer"], again["cache"]["miss_reason"]) == (case.before["answer"], None)
    assert again["usage"]["reused_tokens"] == tokens
    kept = [path.suffix for path in (server.store / "quarantine").iterdir() if case.document["id"] in path.name]
    assert sorted(kept) == ([] if damage.reason == "absent" else ["", ".json"])


@pytest.fixture(scope="module")
def fake_cases(serve_all, demo_model: Path) -> dict[str, Case]:
    """Answers of this engine hash every byte of the KV they build on."""
    fake = {"model_dir": str(demo_model), "fake_layers": 120, "fake_chunk_tokens": 512}
    texts = [story(n, 520 if damage.large else 12) for n, damage in enumerate(MANY)]
    return suffer(serve_all(fake=fake, kv_type="fp16"), MANY, texts)


@pytest.fixture(scope="module")
def model_cases(serve_all, demo_model: Path) -> dict[str, Case]:
    return suffer(serve_all(model=demo_model), MODEL_DAMAGES, [story(n, 4) for n in range(len(MODEL_DAMAGES))])


def story(n: int, n_sentences: int) -> str:
    visits = "".join(f"Visitor {i} climbed {i + n} steps and rested. " for i in range(n_sentences))
    return f"{visits}\n\nThe lighthouse is kept by {KEEPERS[n % len(KEEPERS)]}, who lives below the lamp.\n"


@pytest.mark.parametrize("damage", MANY, ids=lambda damage: damage.name)
def test_an_engine_whose_answers_hash_its_kv_answers_the_same(fake_cases, damage: Damage):
    expect_right_and_tidy(fake_cases[damage.name], damage)


@pytest.mark.parametrize("damage", MODEL_DAMAGES, ids=lambda damage: damage.name)
def test_the_model_answers_right(model_cases, damage: Damage):
    case = model_cases[damage.name]
    assert KEEPERS[MODEL_DAMAGES.index(damage)] in case.after["answer"]
    expect_right_and_tidy(case, damage)


def test_nothing_is_left_over_and_every_snapshot_is_whole_again(fake_cases):
    server = next(iter(fake_cases.values())).server
    server.stop()
    server.start()
    for name in ("building", "trash", "locks"):
        assert files_below(server.store / name) == []
    verdicts = SnapshotStore(server.store).verify()
    assert len(verdicts) > len(MANY)
    assert [verdict for verdict in verdicts if not verdict.ok] == []
    case = fake_cases["shards swapped"]
    answer = server.ask(server.session(case.document["id"]), QUESTION, max_tokens=MAX_TOKENS)
    assert (answer["answer"], answer["cache"]["source"]) == (case.before["answer"], "disk")
    assert answer["usage"]["reused_tokens"] == case.document["token_count"]


def test_a_turn_whose_kv_is_damaged_is_computed_again_and_the_answer_stays(fake_cases):
    case = fake_cases["newer format version"]
    server, follow_up = case.server, "And since when?"
    flipped, missing, whole = (server.session(case.document["id"]) for _ in range(3))
    (first,) = {server.ask(one, QUESTION, max_tokens=9)["answer"] for one in (flipped, missing, whole)}
    turn_ids = [server.turns(one)[0]["id"] for one in (flipped, missing)]
    server.stop()
    directories = [next((server.store / "snapshots").glob(f"*/turns/{turn_id}/*")) for turn_id in turn_ids]
    FEW[0].apply(directories[0], directories[0])
    next(directories[1].glob("shard-*")).unlink()
    server.start()
    expected = server.ask(whole, follow_up, max_tokens=9)
    assert expected["cache"]["miss_reason"] is None
    for damaged, reason in ((flipped, "checksum"), (missing, "truncated")):
        answer = server.ask(damaged, follow_up, max_tokens=9)
        assert answer["answer"] == expected["answer"] != first
        assert answer["cache"]["miss_reason"] == reason
        assert answer["usage"]["prefilled_tokens"] > expected["usage"]["prefilled_tokens"]
        assert answer["usage"]["reused_tokens"] == case.document["token_count"]
