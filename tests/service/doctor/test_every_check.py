"""Every check of the doctor finds the faults planted for it, and is silent on a healthy machine: a check without a
planted fault fails here, and so does a trap that no check answers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

from service.doctor.examine import CHECKS
from tests.cache_store.tiers.servers import RedisServer
from tests.service.doctor.planted import Planted, cores

V100 = {"name": "Tesla V100-SXM2-16GB", "total": "16160", "capability": "7.0"}
P40 = {"name": "Tesla P40", "total": "22919", "capability": "6.1"}
GPTQ = {"quant_method": "gptq", "bits": 4}
STATUS = "Name: python\nVmSwap: 204800 kB\nRssAnon: 1000 kB\n"
ENGINE = "python\0-m\0service.engine.remote.server\0"


def setting(**changes: object) -> Callable[[Planted], None]:
    return lambda machine: machine.changes.update(changes)


def variable(name: str, value: str) -> Callable[[Planted], None]:
    return setting(environment={name: value})


def card(**changes: str) -> Callable[[Planted], None]:
    return lambda machine: machine.card.update(changes)


def file(name: str, text: str) -> Callable[[Planted], None]:
    return lambda machine: machine.files.update({name: text})


def has(**changes: object) -> Callable[[Planted], None]:
    def plant(machine: Planted) -> None:
        for name, value in changes.items():
            setattr(machine, name, value)

    return plant


def redis(name: str, value: str) -> Callable[[Planted], None]:
    def plant(machine: Planted) -> None:
        client = Redis.from_url(machine.redis_url)
        client.config_set(name, value)
        client.close()

    return plant


def both(*plants: Callable[[Planted], None]) -> Callable[[Planted], None]:
    def plant(machine: Planted) -> None:
        for one in plants:
            one(machine)

    return plant


TORCH_OF_CPU = """
import types
__version__ = "2.11.0+cpu"
version = cuda = types.SimpleNamespace(cuda=None, is_available=lambda: False)
"""


FAULTS: dict[str, dict[str, Callable[[Planted], None]]] = {
    "off-card": {
        "layers on the processor": setting(engine="torch"),
        "no driver": file("bin/nvidia-smi", "#!/bin/sh\nexit 9\n"),
        "a card that is hidden": variable("CUDA_VISIBLE_DEVICES", ""),
        "llama.cpp that may stay on the processor": setting(engine="llamacpp"),
        "llama.cpp told to": setting(engine="llamacpp", offload="none"),
    },
    "versions": {
        "an old driver": has(cuda="12.2"),
        "a torch without CUDA": file("site/torch.py", TORCH_OF_CPU),
        "a torch that cannot be loaded": file("site/torch.py", "raise ImportError('libcudart.so.13')"),
        "an extension of another torch": file("site/exllamav2_ext.py", "raise ImportError('undefined symbol')"),
        "another nvcc": has(nvcc="12.6"),
    },
    "kernels": {
        "a torch without the card's": card(**V100),
        "an extension for another card": file("ext/py311_cu130/exllamav2_ext/build.ninja", "code=sm_90"),
        "a wrong list": variable("TORCH_CUDA_ARCH_LIST", "9.0"),
        "a card that the engine refuses": card(**P40),
    },
    "dtype": {
        "BF16 on Volta": both(card(**V100), has(dtype="BF16")),
        "BF16 emulated": both(
            setting(engine="torch", compute_dtype="bfloat16"), file("proc/cpuinfo", "flags : avx2\n")
        ),
    },
    "model": {"not imported": has(imported=False), "a damaged card": file("models/big/preread.json", "{")},
    "draft-model": {
        "that is missing": setting(draft_model="nowhere"),
        "of other tokens": lambda machine: machine.add_draft_model(vocab={"b": 0}),
        "as large as the model": lambda machine: machine.add_draft_model(n_parameters=500_000),
        "that is never asked": both(setting(speculation="off"), Planted.add_draft_model),
        "of llama.cpp": both(setting(engine="llamacpp"), Planted.add_draft_model),
    },
    "gptq": {
        "small groups": has(model={"quantization_config": GPTQ | {"group_size": 32, "desc_act": False}}),
        "act-order": has(model={"quantization_config": GPTQ | {"group_size": 128, "desc_act": True}}),
        "FP8": has(model={"quantization_config": {"quant_method": "fp8"}}),
    },
    "cache-size": {
        "a context that fills the card": both(
            has(model={"max_position_embeddings": 16_000_000}), setting(max_context=16_000_000)
        )
    },
    "host-memory": {"more than there is": setting(host_bytes=1 << 50)},
    "other-processes": {"a game": has(processes="GPU-1, 4711, /usr/bin/game, 3000")},
    "throttling": {
        "heat": card(throttle="0x0000000000000040"),
        "power": card(throttle="0x0000000000000004"),
        "nearly": card(celsius="90"),
    },
    "pcie": {"four lanes": card(width="4")},
    "first-call": {
        "a driver that is unloaded": card(persistence="Disabled"),
        "a slow clock": file("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n"),
    },
    "paths": {"a blank": variable("TRITON_CACHE_DIR", "/home/my user/triton")},
    "swap": {
        "much of it in use": file("proc/meminfo", "MemAvailable: 9 kB\nSwapTotal: 4000000 kB\nSwapFree: 3000000 kB\n"),
        "the engine in it": both(file("proc/77/status", STATUS), file("proc/77/cmdline", ENGINE)),
    },
    "threads": {
        "more than cores": setting(threads=cores() + 1),
        "more than a container's share": both(
            file("sys/fs/cgroup/cpu.max", "50000 100000\n"), setting(threads=2)
        ),
    },
    "disk-speed": {"slower than computing": has(prefill_tok_s=10_000_000_000)},
    "disk-room": {"none": setting(free_floor_bytes=1 << 60)},
    "tesseract": {
        "missing": file("bin/tesseract", "#!/bin/sh\nexit 127\n"),
        "a language": setting(ocr_languages="eng+deu"),
    },
    "redis": {"does not answer": setting(redis_url="redis://127.0.0.1:1/0")},
    "redis-memory": {
        "without a bound": redis("maxmemory", "0"),
        "that drops": redis("maxmemory-policy", "allkeys-lru"),
    },
    "redis-persistence": {"dumps": redis("save", "60 1000"), "a log": redis("appendonly", "yes")},
}  # fmt: skip
HEALTHY: dict[str, Callable[[Planted], None]] = {
    "gptq": has(model={"quantization_config": GPTQ | {"group_size": 128, "desc_act": False}}),
    "draft-model": Planted.add_draft_model,
}
"""Where a check has nothing to look at, what is good of its kind."""
TRAPS = {
    "layers silently left on the CPU": "off-card",
    "max_seq_len so large that the KV cache fills the card": "cache-size",
    "wrong dtype (BF16 on Volta)": "dtype",
    "kernels compiled for the wrong architecture": "kernels",
    "group size 32, desc_act": "gptq",
    "timing the first, cold call": "first-call",
    "a model path with a blank in it": "paths",
    "memory not accounted before loading": "cache-size",
    "thermal throttling": "throttling",
    "other processes on the card": "other-processes",
    "driver, CUDA and torch that do not fit": "versions",
    "PCIe width": "pcie",
    "swap in use": "swap",
    "a disk slower than computing": "disk-speed",
    "Redis without a bound": "redis-memory",
    "Redis that persists": "redis-persistence",
    "missing Tesseract": "tesseract",
}
"""Of the field's reports and ours. No prefix cache is none here: the system prompt is part of each snapshot."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    started = RedisServer(tmp_path_factory.mktemp("redis"))
    yield started
    started.kill()


@pytest.fixture
def machine(server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    client = server.client()
    for name, value in {"maxmemory": "64mb", "maxmemory-policy": "noeviction", "save": "", "appendonly": "no"}.items():
        client.config_set(name, value)
    client.close()
    return Planted(tmp_path, monkeypatch, server.url)


@pytest.mark.parametrize("check", CHECKS)
def test_a_healthy_machine_is_not_complained_about(check: str, machine: Planted) -> None:
    HEALTHY.get(check, has())(machine)
    found = machine.look(check)
    assert (found.status, found.remedy) == ("ok", ""), found.evidence


@pytest.mark.parametrize(("check", "fault"), [(check, fault) for check, faults in FAULTS.items() for fault in faults])
def test_a_planted_fault_is_found(check: str, fault: str, machine: Planted) -> None:
    FAULTS[check][fault](machine)
    found = machine.look(check)
    assert found.status in ("warn", "fail"), found.evidence
    assert found.evidence
    assert found.remedy


def test_every_check_has_a_planted_fault_and_every_trap_a_check() -> None:
    assert {check for check, faults in FAULTS.items() if faults} == set(CHECKS)
    assert set(TRAPS.values()) <= set(CHECKS)
