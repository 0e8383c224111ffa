from pathlib import Path

import pytest

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.scratch import Shape
from service.engine.factory import EngineConfig, open_host
from service.engine.ledger import GIB, CardMemory, MemoryPlanRefused
from service.engine.torch_engine import ledger as ledger_module
from service.engine.torch_engine.ledger import (
    HostSizes,
    HostWeights,
    check_fits,
    free_swap,
    host_ledger,
    machine_memory,
)
from service.engine.torch_engine.runner import TorchRunner

SHAPE = Shape(576, 1536, 30, 9, 3, 64, 49152)
LAYOUT = KVLayout(30, 3, 64, KVType.K8V4)
SIZES = HostSizes(n_slots=9, tail_rows=2048, documents_nbytes=2 * GIB)
PLENTY = CardMemory(free=20 * GIB, total=24 * GIB)
MIB = 1 << 20


def weights(stored: int = 4, compute: int = 4) -> HostWeights:
    return HostWeights(134_515_008, 70_000_000, stored, compute)


def lines(stored: int = 4, compute: int = 4, sizes: HostSizes = SIZES) -> dict[str, int]:
    found = host_ledger(weights(stored, compute), SHAPE, LAYOUT, sizes, PLENTY)
    return {line.name: line.nbytes for line in found.lines}


def test_the_lines_say_what_is_held() -> None:
    found = lines()
    assert found["weights"] == 4 * 134_515_008
    assert found["weights: joined matrices"] == 4 * 70_000_000
    assert found["tails of sequences"] == 9 * 2048 * 30 * 3 * 64 * 8
    block = 256 * 30 * 3 * 64 * 8
    assert found["documents"] == 2 * GIB // block * block


def test_weights_of_another_dtype_are_in_memory_twice_while_they_are_converted() -> None:
    small = HostSizes(1, 64, 0)
    found = lines(4, 2, small)
    assert "weights: joined matrices" not in found
    passing = found["weights as stored, while they are converted"]
    assert 500 * MIB > passing > 400 * MIB
    assert passing + found["one chunk of prefill"] + found["tails of sequences"] == 4 * 134_515_008
    assert lines(4, 2)["weights as stored, while they are converted"] == 0  # documents take more later


def test_documents_get_what_is_left() -> None:
    tight = CardMemory(free=3 * GIB, total=4 * GIB)
    ledger = host_ledger(weights(), SHAPE, LAYOUT, SIZES, tight)
    assert 0 < ledger.nbytes("pool") < 2 * GIB
    assert sum(line.nbytes for line in ledger.lines) <= tight.total
    assert "memory" in ledger.table()
    check_fits(ledger)


def test_what_cannot_fit_is_refused_with_the_plan() -> None:
    ledger = host_ledger(weights(), SHAPE, LAYOUT, SIZES, CardMemory(free=GIB * 3 // 4, total=4 * GIB))
    with pytest.raises(MemoryPlanRefused, match="GiB are missing before any document") as refused:
        check_fits(ledger)
    assert "weights: joined matrices" in str(refused.value)
    assert "PREREAD_MAX_BATCH" in str(refused.value)


def test_pages_of_files_are_no_reason_to_refuse() -> None:
    """The system takes them back: stored weights that are converted, and those of which there are joined copies."""
    tight = CardMemory(free=GIB, total=4 * GIB)
    for stored, compute in ((4, 4), (8, 4)):
        check_fits(host_ledger(weights(stored, compute), SHAPE, LAYOUT, HostSizes(1, 64, 0), tight))


def test_swap_that_is_free_counts_with_a_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    ledger = host_ledger(weights(), SHAPE, LAYOUT, SIZES, CardMemory(free=GIB // 2, total=4 * GIB))
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemFree: 1 kB\nSwapTotal: 4000000 kB\nSwapFree:  2000000 kB\n")
    monkeypatch.setattr(ledger_module, "_MEMINFO", meminfo)
    assert free_swap() == 2_000_000 * 1024
    check_fits(ledger, free_swap())
    assert "GiB short" in caplog.text
    meminfo.write_text("SwapFree: 1000 kB\n")
    with pytest.raises(MemoryPlanRefused):
        check_fits(ledger, free_swap())
    meminfo.unlink()
    assert free_swap() == 0


def test_tails_that_may_never_be_full_are_no_reason_to_refuse() -> None:
    tight = CardMemory(free=3 * GIB // 2, total=2 * GIB)
    ledger = host_ledger(weights(), SHAPE, LAYOUT, SIZES, tight)
    assert ledger.pool_blocks == 0
    check_fits(ledger)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine_memory()
    limit = tmp_path / "memory.max"
    limit.write_text(f"{whole.total // 2}\n")
    monkeypatch.setattr(ledger_module, "_CGROUP", limit)
    assert machine_memory().total == whole.total // 2
    assert machine_memory().free <= whole.total // 2
    limit.write_text("max\n")
    assert machine_memory().total == whole.total


def test_the_engine_refuses_before_it_loads(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{128 * MIB}\n")
    monkeypatch.setattr(ledger_module, "_CGROUP", limit)
    monkeypatch.setattr(ledger_module, "_MEMINFO", tmp_path / "no swap")
    monkeypatch.setattr(TorchRunner, "load", lambda *_, **__: pytest.fail("it began to load"))
    config = EngineConfig(store_dir=str(tmp_path / "store"), model_dir=str(model_dir))
    with pytest.raises(MemoryPlanRefused, match="does not fit this machine's memory"):
        open_host(config)


def test_the_engine_says_its_plan_before_it_loads(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Loading(Exception):
        pass

    def load(*_: object, **__: object) -> None:
        raise Loading

    monkeypatch.setattr(TorchRunner, "load", load)
    with caplog.at_level("INFO"), pytest.raises(Loading):
        open_host(EngineConfig(store_dir=str(tmp_path / "store"), model_dir=str(model_dir)))
    assert "tails of sequences" in caplog.text
