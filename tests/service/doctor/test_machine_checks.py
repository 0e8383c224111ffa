"""Faults of models, machine and Redis, planted as files, processes and settings."""

import json
import shutil
import stat
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from cache_store.speeds import SpeedBook
from service.cli import main
from service.doctor.examine import CHECKS, examine
from service.doctor.facts import MemoryFacts
from service.doctor.probes import SystemProbes
from service.errors import Invalid
from service.planning.nvidia import ENGINE, CardProcess
from tests.cache_store.tiers.servers import RedisServer
from tests.service.doctor.machine import CARD, GIB, Machine, look, settings, write_model


def write_program(directory: Path, name: str, script: str) -> None:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_blank_in_a_path_is_found(tmp_path: Path) -> None:
    model = write_model(tmp_path / "my models" / "big")
    found = look("paths", tmp_path, Machine(), model)
    assert found.status == "warn"
    assert "my models" in found.evidence
    assert look("paths", tmp_path, Machine(), write_model(tmp_path / "big")).status == "ok"
    planted = Machine(variables={"TORCH_EXTENSIONS_DIR": "/home/my user/ext"})
    assert "TORCH_EXTENSIONS_DIR" in look("paths", tmp_path, planted, tmp_path / "big").evidence


@pytest.mark.parametrize(
    ("group_size", "desc_act", "evidence"),
    [(32, False, "group_size is 32"), (128, True, "desc_act is true"), (32, True, "group_size is 32 and desc_act")],
)
def test_gptq_models_that_are_read_slowly(group_size: int, desc_act: bool, evidence: str, tmp_path: Path) -> None:
    how = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": desc_act}
    found = look("gptq", tmp_path, Machine(), write_model(tmp_path / "m", quantization_config=how))
    assert found.status == "warn"
    assert evidence in found.evidence


def test_a_good_gptq_model_others_and_what_is_not_read(tmp_path: Path) -> None:
    good = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    assert look("gptq", tmp_path, Machine(), write_model(tmp_path / "g", quantization_config=good)).status == "ok"
    assert look("gptq", tmp_path, Machine(), write_model(tmp_path / "p")).status == "skip"
    fp8 = look("gptq", tmp_path, Machine(), write_model(tmp_path / "f", quantization_config={"quant_method": "fp8"}))
    assert fp8.status == "fail"
    assert "quantized as fp8" in fp8.evidence


def test_a_model_that_was_not_imported_is_found(tmp_path: Path) -> None:
    found = look("model", tmp_path, Machine(), write_model(tmp_path / "m"))
    assert found.status == "fail"
    assert "import it first" in found.evidence


def test_a_cache_that_is_too_large_is_found(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", max_position_embeddings=16_000_000)
    found = look("cache-size", tmp_path, Machine(), model, max_context=16_000_000)
    assert found.status == "fail"
    assert "16,000,000 tokens of documents do not fit, only" in found.evidence
    assert "would fit" in found.remedy
    assert look("cache-size", tmp_path, Machine(), model).status == "ok"


def test_memory_that_is_promised_and_not_there(tmp_path: Path) -> None:
    found = look("host-memory", tmp_path, Machine(), host_bytes=1 << 50)
    assert found.status == "fail"
    assert "PREREAD_HOST_BYTES" in found.evidence
    assert look("host-memory", tmp_path, Machine(), engine="torch", resident_bytes=1 << 50).status == "fail"
    assert look("host-memory", tmp_path, Machine()).status == "ok"


def test_what_a_running_engine_holds_counts_as_free(tmp_path: Path) -> None:
    some = psutil.virtual_memory()
    wanted = (some.available + some.total) // 2
    assert look("host-memory", tmp_path, Machine(), host_bytes=wanted).status == "fail"
    running = Machine(engines=some.total)
    assert look("host-memory", tmp_path, running, host_bytes=wanted).status == "ok"
    model = write_model(tmp_path / "m")
    full = replace(CARD, free_nbytes=GIB // 2)
    assert look("cache-size", tmp_path, Machine(states=[full]), model).status == "fail"
    own = CardProcess(7, f"python -m {ENGINE}", 20 * GIB)
    assert look("cache-size", tmp_path, Machine(states=[replace(full, processes=(own,))]), model).status == "ok"


def test_memory_of_running_engines_is_read_from_the_kernels_files(tmp_path: Path) -> None:
    proc = kernel_files(tmp_path, swap_free_kib=0, engine_swap_kib=0)
    with (proc / "77" / "status").open("a") as file:
        file.write("RssAnon:\t 1000 kB\nRssFile: 500 kB\nRssShmem: 24 kB\n")
    assert SystemProbes(proc=proc).engines_nbytes() == 1024 * 1024


def test_a_missing_client_of_redis_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "service.doctor.redis_probe", None)
    found = look("redis", tmp_path, SystemProbes(environment={}), redis_url="redis://127.0.0.1:1/0")
    assert found.status == "fail"
    assert "pip install '.[redis]'" in found.evidence


def kernel_files(tmp_path: Path, *, swap_free_kib: int, engine_swap_kib: int) -> Path:
    proc = tmp_path / "proc"
    (proc / "77").mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemAvailable:   8000000 kB\nSwapTotal: 4000000 kB\nSwapFree: {swap_free_kib} kB\nHugePages_Total: 0\n"
    )
    (proc / "77" / "status").write_text(f"Name: python\nVmSwap: {engine_swap_kib} kB\n")
    (proc / "77" / "cmdline").write_bytes(b"python\0-m\0service.engine.remote.server\0--config\0x\0")
    (proc / "cpuinfo").write_text("flags : avx2 amx_bf16\n")
    return proc


@pytest.mark.parametrize(
    ("free", "engine", "status", "evidence"),
    [
        (4_000_000, 0, "ok", "0 MiB"),
        (3_000_000, 0, "warn", "0.95 of 3.81 GiB of swap in use"),
        (3_000_000, 204_800, "fail", "pid 77: 200 MiB"),
        (4_000_000, 2_048, "ok", "0 MiB"),
    ],
)
def test_swap_is_found_in_the_kernels_files(free: int, engine: int, status: str, evidence: str, tmp_path: Path) -> None:
    probes = SystemProbes(proc=kernel_files(tmp_path, swap_free_kib=free, engine_swap_kib=engine))
    found = look("swap", tmp_path, probes)
    assert found.status == status
    assert evidence in found.evidence
    assert "amx_bf16" in probes.processor_flags()


def test_a_model_of_llama_cpp_is_not_planned_for_as_if_another_engine_had_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "big")
    found = look("cache-size", tmp_path, Machine(), model, engine="llamacpp", max_context=16_000_000)
    assert (found.status, "plan --engine llamacpp" in found.evidence) == ("skip", True)


def test_more_threads_than_a_container_has_cores(tmp_path: Path) -> None:
    (tmp_path / "sys" / "fs" / "cgroup").mkdir(parents=True)
    (tmp_path / "sys" / "fs" / "cgroup" / "cpu.max").write_text("50000 100000\n")
    probes = SystemProbes(sys_root=tmp_path / "sys", environment={"OMP_NUM_THREADS": "2"})
    found = look("threads", tmp_path, probes)
    assert (found.status, found.evidence) == ("warn", "2 threads compute on 0.5 cores")
    assert look("threads", tmp_path, Machine(), threads=8).status == "ok"
    assert look("threads", tmp_path, Machine(), threads=9).status == "warn"
    share = look("threads", tmp_path, Machine(n_cores=2.0, n_threads=64))  # as `docker run --cpus 2` on a large machine
    assert (share.status, share.evidence) == ("warn", "64 threads compute on 2 cores")
    assert look("threads", tmp_path, Machine(n_cores=0.5, n_threads=1)).status == "ok", "fewer threads there are not"
    shared = Machine(n_cores=2.0, n_threads=64)
    assert look("threads", tmp_path, shared, engine="llamacpp").status == "ok", "it looks at the share itself"
    assert look("threads", tmp_path, shared, engine="llamacpp", threads=3).status == "warn"


def test_the_processors_clock_is_read_from_the_kernels_files(tmp_path: Path) -> None:
    frequency = tmp_path / "devices/system/cpu/cpu0/cpufreq"
    frequency.mkdir(parents=True)
    (frequency / "scaling_governor").write_text("powersave\n")
    (frequency / "scaling_driver").write_text("acpi-cpufreq\n")
    assert SystemProbes(sys_root=tmp_path).governors() == {"powersave"}
    (frequency / "scaling_driver").write_text("intel_pstate\n")
    assert SystemProbes(sys_root=tmp_path).governors() == set()


def prefilled(tmp_path: Path, tok_s: int) -> None:
    """As a server notes down how fast it read a document."""
    book = settings(tmp_path).store_dir / "speeds.json"
    book.parent.mkdir(parents=True, exist_ok=True)
    book.unlink(missing_ok=True)
    SpeedBook(book).record_prefill(tok_s, 1.0)


def test_a_disk_that_is_slower_than_computing_is_found(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    prefilled(tmp_path, 10_000_000_000)
    fast_prefill = look("disk-speed", tmp_path, SystemProbes(environment={}), model, engine="torch")
    assert fast_prefill.status == "fail"
    assert "10000000000 tokens of prefill a second (measured)" in fast_prefill.evidence
    prefilled(tmp_path, 1000)
    assert look("disk-speed", tmp_path, Machine(gbps=2.0), model).status == "ok"
    assert look("disk-speed", tmp_path, Machine(gbps=1e-6), model).status == "fail"


def test_a_disk_without_room_is_found(tmp_path: Path) -> None:
    found = look("disk-room", tmp_path, Machine(), free_floor_bytes=1 << 60)
    assert found.status == "fail"
    assert look("disk-room", tmp_path, Machine()).status == "ok"


def test_a_store_on_a_disk_of_its_own_is_the_one_that_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, asked = settings(tmp_path).store_dir, []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as mounted:
        store.parent.mkdir(parents=True, exist_ok=True)
        store.symlink_to(mounted)
        free = {store: GIB // 4, store.parent: 1 << 60}
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
        found = look("disk-room", tmp_path, Machine(), free_floor_bytes=GIB)
        assert found.status == "fail"
        assert f"0.25 GiB free in {store}" in found.evidence
        free[store.parent], free[store] = free[store], free[store.parent]
        assert f"in {store.parent}" in look("disk-room", tmp_path, Machine(), free_floor_bytes=GIB).evidence
        prefilled(tmp_path, 1000)
        machine = Machine()
        monkeypatch.setattr(machine, "read_gbps", lambda directory: asked.append(directory) or 2.0, raising=False)
        assert look("disk-speed", tmp_path, machine, write_model(tmp_path / "m")).status == "ok"
    assert asked == [store]


def test_a_missing_tesseract_and_missing_languages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    write_program(programs, "tesseract", "echo eng; echo osd")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    assert look("tesseract", tmp_path, Machine()).status == "ok"
    lacking = look("tesseract", tmp_path, Machine(), ocr_languages="eng+deu")
    assert (lacking.status, lacking.remedy) == ("warn", "apt-get install tesseract-ocr-deu")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "not installed" in look("tesseract", tmp_path, Machine()).evidence
    assert look("tesseract", tmp_path, Machine(), ocr_languages="none").status == "skip"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


def configured(redis: RedisServer, **options: str) -> str:
    client = redis.client()
    for name, value in options.items():
        client.config_set(name.replace("_", "-"), value)
    client.close()
    return redis.url


GOOD = {"maxmemory": "64mb", "maxmemory_policy": "noeviction", "save": "", "appendonly": "no"}


@pytest.mark.parametrize(
    ("check", "options", "status", "evidence"),
    [
        ("redis-memory", {"maxmemory": "0"}, "fail", "maxmemory is 0"),
        ("redis-memory", {"maxmemory_policy": "allkeys-lru"}, "warn", "allkeys-lru"),
        ("redis-persistence", {"save": "60 1000"}, "warn", "save is '60 1000'"),
        ("redis-persistence", {"appendonly": "yes"}, "warn", "appendonly is yes"),
    ],
)
def test_a_real_redis_with_a_bad_configuration(
    check: str, options: dict[str, str], status: str, evidence: str, redis: RedisServer, tmp_path: Path
) -> None:
    probes = SystemProbes(environment={})
    url = configured(redis, **GOOD)
    assert [look(name, tmp_path, probes, redis_url=url).status for name in ("redis", check)] == ["ok", "ok"]
    found = look(check, tmp_path, probes, redis_url=configured(redis, **GOOD | options))
    assert found.status == status
    assert evidence in found.evidence


def test_a_redis_that_does_not_answer(tmp_path: Path) -> None:
    found = look("redis", tmp_path, SystemProbes(environment={}), redis_url="redis://127.0.0.1:1/0")
    assert found.status == "fail"
    assert "PREREAD_REDIS_URL" in found.evidence
    assert look("redis", tmp_path, Machine()).status == "skip"


def test_all_checks_are_silent_on_a_healthy_machine(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    prefilled(tmp_path, 1000)
    found = examine(settings(tmp_path, redis_url="redis://a/0"), Machine(), model_dir=model)
    complained = {finding.check for finding in found.findings if finding.status in ("warn", "fail")}
    # The model of these tests was not imported; Tesseract is the machine's own.
    assert complained - {"model", "tesseract"} == set()
    assert {finding.check for finding in found.findings} == set(CHECKS)


def test_the_worst_comes_first(tmp_path: Path) -> None:
    held = MemoryFacts(GIB, GIB, GIB, {5: GIB})
    found = examine(settings(tmp_path), Machine(held=held), only=["threads", "swap", "redis"])
    assert [finding.status for finding in found.findings] == ["fail", "ok", "skip"]
    assert not found.healthy
    with pytest.raises(Invalid, match="no check 'nonsense'"):
        examine(settings(tmp_path), Machine(), only=["nonsense"])


def run(*arguments: str, exit_code: int) -> str:
    result = CliRunner().invoke(main, ["doctor", *arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def test_the_command_ends_with_1_when_a_check_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PREREAD_ENGINE", "torch")
    text = run("--check", "model", "--check", "redis", exit_code=1)
    assert text.startswith("FAIL model")
    assert "-> `preread models list`" in text
    found: dict[str, Any] = json.loads(run("--check", "redis", "--json", exit_code=0))
    assert found == {
        "healthy": True,
        "findings": [{"check": "redis", "status": "skip", "evidence": "no Redis is used", "remedy": ""}],
    }
