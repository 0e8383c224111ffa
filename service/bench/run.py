"""The engine that is measured, and what is written down beside its figures."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from service.bench.measure import QUESTION_TOKENS, Work
from service.bench.physics import Physics
from service.bench.results import FORMAT, Row, Run
from service.core.engines import engine_config
from service.engine.factory import EngineConfig
from service.engine.messages import EngineInfo
from service.planning.nvidia import read_cards
from service.settings import Settings

_PACKAGES = ("torch", "transformers", "exllamav2", "triton")


def bench_config(settings: Settings, store_dir: Path, work: Work) -> EngineConfig:
    """As the service makes it, but with room for all users at once, a store of its own and no tiers beyond the disk."""
    config = engine_config(settings)
    tail = max(config.tail_tokens, work.answer_tokens + 2 * QUESTION_TOKENS)
    plain = EngineConfig(store_dir=str(store_dir)).tiers
    return msgspec.structs.replace(
        config, store_dir=str(store_dir), max_batch=max(config.max_batch, *work.users), tail_tokens=tail, tiers=plain
    )


def place_of(settings: Settings, info: EngineInfo) -> dict[str, str]:
    """Machine, versions and settings: what has to be the same for two runs to be compared."""
    place = {
        "device": _device(settings), "engine": settings.engine, "model": info.model_name, "kv": settings.kv_type,
        "cores": str(os.cpu_count()), "threads": str(settings.threads or "all"), "python": platform.python_version(),
    }  # fmt: skip
    return place | {name: found for name in _PACKAGES if (found := _version(name))}


def _device(settings: Settings) -> str:
    if settings.engine == "exl2" and (cards := read_cards()):
        return cards[0].name
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "processor")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def run_of(place: dict[str, str], physics: Physics | None, rows: list[Row]) -> Run:
    """A run that ended now."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    ceilings = (physics.bandwidth_gbps, physics.tflops) if physics else (0.0, 0.0)
    return Run(FORMAT, at, place, *ceilings, rows)
