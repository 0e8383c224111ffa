from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cache_store.keys import SnapshotKey
from service.engine.host.warm import prepare_memory


@dataclass
class Recorder:
    asked: list[int] = field(default_factory=list)
    tier: str = "host"

    def prepare_document(self, n_tokens: int) -> None:
        self.asked.append(n_tokens)


def store(*entries: tuple[str, str, int | None]) -> Any:
    """Of entries of a state, a kind with an id, and a number of tokens."""
    found = [
        SimpleNamespace(state=state, name=SimpleNamespace(key=SnapshotKey("own", *named.split())), n_tokens=n)
        for state, named, n in entries
    ]
    return SimpleNamespace(entries=lambda: found)


def prepared(entries: Any, max_tokens: int) -> list[int]:
    runner: Any = Recorder()
    prepare_memory(runner, entries, max_tokens).join()
    return runner.asked


def test_memory_is_prepared_for_the_largest_document_within_the_bound() -> None:
    entries = store(
        ("published", "document a", 500),
        ("published", "document b", 900),
        ("published", "document c", 5000),
        ("published", "turn d", 1000),
        ("quarantined", "document e", 950),
        ("published", "document f", None),
    )
    assert prepared(entries, 1000) == [900]


def test_of_a_windowed_document_only_what_is_resident_counts() -> None:
    entries = store(("published", "document a", 900), ("published", "resident a", 70), ("published", "document b", 80))
    assert prepared(entries, 1000) == [80]


def test_nothing_is_prepared_for_an_empty_store() -> None:
    assert prepared(store(), 1000) == []


def test_a_fault_costs_only_speed(caplog: Any) -> None:
    def entries() -> list[Any]:
        raise OSError("no such store")

    assert prepared(SimpleNamespace(entries=entries), 1000) == []
    assert "no memory was prepared" in caplog.text


def test_a_runner_with_memory_of_its_own_costs_no_look_into_the_store(caplog: Any) -> None:
    runner: Any = Recorder(tier="gpu")
    unreadable: Any = SimpleNamespace(entries=lambda: 1 / 0)
    prepare_memory(runner, unreadable, 1000).join()
    assert runner.asked == []
    assert not caplog.text
