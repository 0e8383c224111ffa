"""The engine that is measured, and what is written down beside its figures."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from cache_store.tiers.opening import TierConfig
from service.bench.measure import Bench, Work
from service.bench.results import FORMAT, LeftOut, Run
from service.bench.talk import QUESTION_TOKENS
from service.core.engines import engine_config
from service.engine.factory import EngineConfig
from service.engine.llama_engine.library import PACKAGE, gpu_backends
from service.engine.messages import EngineInfo
from service.errors import Invalid
from service.planning.placing import computes_on_card
from service.planning.visible import visible_cards
from service.settings import Settings

_PACKAGES = ("torch", "transformers", "exllamav2", "triton")


def bench_config(settings: Settings, store_dir: Path, work: Work) -> EngineConfig:
    """As the service makes it, but with room for all users at once, one token a step whatever is answered, and a store
    of its own without tiers beyond the disk: copies in these are made and brought by the bench itself, when nothing
    else is measured."""
    config = engine_config(settings)
    tail = max(config.tail_tokens, work.answer_tokens + 2 * QUESTION_TOKENS)
    plain = TierConfig(encryption_key_file=config.tiers.encryption_key_file)
    return msgspec.structs.replace(
        config, store_dir=str(store_dir), max_batch=max(config.max_batch, *work.users), tail_tokens=tail, tiers=plain,
        speculation="off",
    )  # fmt: skip


def place_of(settings: Settings, info: EngineInfo) -> dict[str, str]:
    """Machine, versions and settings: what has to be the same for two runs to be compared."""
    place = {
        "device": _device(settings), "engine": settings.engine, "model": info.model_name, "kv": settings.kv_type,
        "cores": str(os.cpu_count()), "threads": str(settings.threads or "all"), "python": platform.python_version(),
    }  # fmt: skip
    packages = (*_PACKAGES, PACKAGE) if settings.engine == "llamacpp" else _PACKAGES
    return place | {name: found for name in packages if (found := _version(name))}


def _device(settings: Settings) -> str:
    if computes_on_card(settings, gpu_backends()):
        try:
            if cards := visible_cards():
                return cards[0].name
        except Invalid:
            return "part of a card"
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


def not_configured(settings: Settings, bench: Bench) -> list[LeftOut]:
    """Tiers that this installation does not have."""
    why = {"Redis": not settings.redis_url, "the object store": not settings.object_url}
    names = {"Redis": "PREREAD_REDIS_URL", "the object store": "PREREAD_OBJECT_URL"}
    found = [LeftOut(f"restore from {tier}", f"not configured: {names[tier]}") for tier, off in why.items() if off]
    if not bench.engine.has_host_tier:
        on_card = any(row.name.startswith("first token, gpu") for row in bench.rows)
        reason = "not configured: PREREAD_HOST_BYTES" if on_card else "the model computes in it: nothing is restored"
        found.insert(0, LeftOut("restore from host memory", reason))
    return found


def run_of(place: dict[str, str], settings: Settings, bench: Bench) -> Run:
    """What was measured until now."""
    at, physics = datetime.now(UTC).isoformat(timespec="seconds"), bench.physics
    ceilings = (physics.bandwidth_gbps, physics.tflops) if physics else (0.0, 0.0)
    return Run(FORMAT, at, place, *ceilings, bench.rows, [*bench.left_out, *not_configured(settings, bench)])
