"""What leaves a full disk, in which order, and what never does."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cache_store.errors import BudgetExceeded, MissReason, SnapshotMiss
from cache_store.keys import EntryName, SnapshotKey
from cache_store.store import SnapshotStore
from tests.cache_store.recipes import FINGERPRINT, RESIDENT, Recipe

OLD = replace(FINGERPRINT, weights="w0")
OTHER = replace(FINGERPRINT, weights="draft")
HOUR = 3600.0
NOW = 1_900_000_000.0


def document(name: str, n_tokens: int = 43) -> Recipe:
    return Recipe(key=SnapshotKey("alice", "document", name), n_tokens=n_tokens)


def turn(name: str, n_tokens: int = 8) -> Recipe:
    return Recipe(key=SnapshotKey("alice", "turn", name), n_tokens=n_tokens)


def draft(name: str, n_tokens: int = 43) -> Recipe:
    """What a draft model read of a document, with a fingerprint of its own."""
    return replace(Recipe(key=SnapshotKey("alice", "draft", name), n_tokens=n_tokens), fingerprint=OTHER)


@pytest.fixture
def open_store(root: Path) -> Callable[..., SnapshotStore]:
    def opened(budget_nbytes: int | None = None) -> SnapshotStore:
        return SnapshotStore(root, budget_nbytes=budget_nbytes, clock=lambda: NOW)

    return opened


def use(store: SnapshotStore, recipe: Recipe, hours_ago: float, times: int = 1) -> None:
    """As if it had been used so often, so long ago."""
    path = store.marks.path(EntryName(recipe.key, recipe.fingerprint.digest))
    path.write_bytes(b"." * times)
    os.utime(path, (NOW - hours_ago * HOUR,) * 2)


def order(store: SnapshotStore) -> list[str]:
    return [one.name.key.id for one in store.evict_for(None, dry_run=True).gone]


def test_the_order(open_store: Callable[..., SnapshotStore]) -> None:
    store = open_store()
    store.serve(FINGERPRINT, OTHER)
    cases = [
        (replace(draft("other-draft-model"), fingerprint=OLD), 0.0, 4000),
        (replace(document("other-model"), fingerprint=OLD), 0.0, 50),
        (draft("draft-long-ago"), 90.0, 200),
        (draft("draft-just-now"), 0.0, 200),
        (turn("long-ago"), 100.0, 3),
        (turn("lately"), 0.5, 1),
        (document("once-long-ago"), 100.0, 1),
        (document("often-long-ago"), 100.0, 200),
        (document("once-lately"), 2.0, 1),
        (document("often-lately"), 2.0, 200),
        (document("just-now"), 0.0, 1),
    ]
    for recipe, hours_ago, times in reversed(cases):
        recipe.build(store)
        use(store, recipe, hours_ago, times)
    assert order(store) == [recipe.key.id for recipe, *_ in cases]


def test_the_later_turns_of_a_session_go_first(open_store: Callable[..., SnapshotStore]) -> None:
    store = open_store()
    for n in (2, 0, 1):
        recipe = turn(f"turn-{n}")
        with store.begin(
            recipe.key, FINGERPRINT, recipe.layout, recipe.tokens, first_position=100 + n, context_digest=f"{n}"
        ) as builder:
            builder.append(recipe.blocks[0])
            builder.publish()
        use(store, recipe, 3.0 + n / 10)
    assert order(store) == ["turn-2", "turn-1", "turn-0"]


def test_what_costs_more_to_compute_stays_longer(open_store: Callable[..., SnapshotStore]) -> None:
    """More bytes for the same tokens: more room for the same time."""
    store = open_store()
    dear, cheap = document("dear"), replace(document("cheap"), layout=replace(document("x").layout, n_kv_heads=8))
    for recipe in (dear, cheap):
        recipe.build(store)
        use(store, recipe, 5.0)
    assert order(store) == ["cheap", "dear"]
    store.speeds.record_prefill(1000, 1.0)
    (gone,) = [one for one in store.evict_for(None, dry_run=True).gone if one.name.key.id == "dear"]
    assert gone.seconds == pytest.approx(0.043)
    assert gone.why(NOW) == "computed again in 0.043 s; used once, last 5 h ago"


def test_a_full_disk_makes_room_and_says_why_it_was_a_miss(open_store: Callable[..., SnapshotStore]) -> None:
    first, second, third = (document(name) for name in ("first", "second", "third"))
    store = open_store()
    first.build(store)
    size = store.usage()
    reserved = document("size").begin(store)
    budget = store.usage() + size
    reserved.abort()
    store = open_store(budget)
    for hours_ago, recipe in ((5, first), (4, second)):
        recipe.build(store)
        use(store, recipe, hours_ago)
    third.build(store)
    assert store.usage() <= budget
    with pytest.raises(SnapshotMiss) as miss:
        first.read(store)
    assert miss.value.reason is MissReason.EVICTED
    assert second.read(store) == second.blocks
    first.build(store)  # used two moments ago, and still the only one that may go
    assert first.read(store) == first.blocks


def test_what_is_made_from_a_document_goes_with_it(open_store: Callable[..., SnapshotStore], recipe: Recipe) -> None:
    store = open_store()
    recipe.build(store)
    RESIDENT.build(store)
    gone = store.evict_for(1).gone
    assert [(one.name.key, len(one.parts)) for one in gone] == [(recipe.key, 2)]
    assert (store.entries(), store.usage()) == ([], 0)


def test_a_pinned_document_stays(open_store: Callable[..., SnapshotStore], root: Path, recipe: Recipe) -> None:
    store = open_store()
    recipe.build(store)
    store.pin(recipe.key, True)
    plan = store.evict_for(None)
    assert (plan.gone, [one.why(NOW) for one in plan.kept]) == ([], ["pinned"])
    with pytest.raises(BudgetExceeded):
        document("other", n_tokens=60).build(open_store(int(store.usage() * 1.8)))
    assert recipe.read(store) == recipe.blocks
    store.pin(recipe.key, False)
    assert len(store.evict_for(None).gone) == 1
    store.pin(recipe.key, True)
    store.delete(recipe.key)
    assert list((root / "pins").iterdir()) == []


HOLDER = """
import sys, time
from cache_store.store import SnapshotStore
from tests.cache_store.recipes import FINGERPRINT, KEY, LAYOUT
from pathlib import Path
with SnapshotStore(Path(sys.argv[1])).open(KEY, FINGERPRINT, LAYOUT) as reader:
    print("open", flush=True)
    sys.stdin.readline()
"""


def test_what_another_process_reads_stays(open_store: Callable[..., SnapshotStore], root: Path, recipe: Recipe) -> None:
    store = open_store()
    recipe.build(store)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    plan = store.evict_for(None)
    assert (plan.gone, [one.kept for one in plan.kept]) == ([], ["in use"])
    holder.kill()
    holder.communicate()
    assert [one.name.key for one in store.evict_for(None).gone] == [recipe.key]


def test_nothing_goes_for_what_would_not_fit_anyway(open_store: Callable[..., SnapshotStore], recipe: Recipe) -> None:
    store = open_store()
    recipe.build(store)
    store.pin(recipe.key, True)
    small = document("small", n_tokens=9)
    small.build(store)
    with pytest.raises(BudgetExceeded):
        document("large", n_tokens=50).build(open_store(store.usage() + 3000))
    assert small.read(store) == small.blocks


def test_a_turn_takes_the_place_of_nothing_that_is_in_use_just_now(open_store: Callable[..., SnapshotStore]) -> None:
    store = open_store()
    recent = document("recent", n_tokens=80)
    recent.build(store)
    use(store, recent, 0.0)
    store = open_store(store.usage() + 100)
    with pytest.raises(BudgetExceeded):
        turn("turn").build(store)
    use(store, recent, 1.0)
    turn("turn").build(store)
    assert order(store) == ["turn"]


def test_what_a_draft_model_read_gives_way_to_all_and_takes_the_place_of_drafts_alone(
    open_store: Callable[..., SnapshotStore],
) -> None:
    store = open_store()
    store.serve(FINGERPRINT, OTHER)
    old = document("old", n_tokens=80)
    old.build(store)
    use(store, old, 50.0)
    store = open_store(store.usage() + 100)
    with pytest.raises(BudgetExceeded):
        draft("draft").build(store)
    assert old.read(store) == old.blocks
    first = open_store()
    draft("first").build(first)
    use(first, draft("first"), 1.0)
    store = open_store(first.usage() + 11_000)  # with what is reserved for it, a draft needs 16,000
    draft("second").build(store)
    assert {name.key.id for name in store.names()} == {"old", "second"}
    document("new").build(store)
    assert {name.key.id for name in store.names()} == {"old", "new"}
    store.evict_for(None)
    assert store.names() == []


def test_a_draft_is_deleted_with_its_document_and_evicted_without(open_store: Callable[..., SnapshotStore]) -> None:
    store = open_store()
    one = document("one")
    for recipe in (one, draft("one"), draft("lost")):
        recipe.build(store)
    assert [candidate.name.key.kind for candidate in store.evict_for(1).gone] == ["draft"]
    with pytest.raises(SnapshotMiss) as miss:
        draft("lost").read(store)
    assert miss.value.reason in (MissReason.EVICTED, MissReason.ABSENT)
    draft("lost").build(store)
    store.sweep()
    assert {name.key.id for name in store.names()} == {"one"}  # "lost" is of no document
    draft("one").build(store)
    store.delete(one.key)
    assert (store.names(), store.usage()) == ([], 0)


def test_what_no_draft_model_reads_any_more_is_told_and_goes_first(open_store: Callable[..., SnapshotStore]) -> None:
    store = open_store()
    for recipe in (document("one"), draft("one"), replace(document("other-model"), fingerprint=OLD)):
        recipe.build(store)
        use(store, recipe, 0.0, 100)
    store.serve(FINGERPRINT, OTHER)
    assert order(store) == ["other-model", "one", "one"]
    assert store.marks.served_draft == OTHER.digest
    store.serve(FINGERPRINT)
    first = store.evict_for(None, dry_run=True).gone[0]
    assert (first.name.key.kind, first.usable) == ("draft", False)
    assert "draft model that is not served" in first.why(NOW)
    assert [one.name.key for one in open_store().evict_for(1).gone] == [draft("one").key]


def test_a_count_that_a_killed_process_left_too_high_is_put_right(
    open_store: Callable[..., SnapshotStore], root: Path, recipe: Recipe
) -> None:
    store = open_store(100_000)
    (root / "usage").write_text("99999")
    recipe.build(store)
    assert store.usage() == sum(entry.nbytes for entry in store.entries())


def test_marks_that_cannot_be_read_are_none(open_store: Callable[..., SnapshotStore], root: Path) -> None:
    store = open_store()
    for name in ("served", "served-draft"):
        (root / name).write_bytes(b"\xff\xfe")
    assert (store.marks.served, store.marks.served_draft) == (None, None)
    store.serve(FINGERPRINT)
    assert store.marks.served == FINGERPRINT.digest
    (root / "uses" / "alice~document~gone~0123456789abcdef").write_bytes(b".")
    (root / "uses" / "junk").write_bytes(b"")
    store.sweep()
    assert list((root / "uses").iterdir()) == []
