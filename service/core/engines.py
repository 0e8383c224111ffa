"""The engine that the settings name: a supervised process for a server, or one in this process."""

from typing import TYPE_CHECKING

from service.core.prompts import digest_of_prompt
from service.core.snapshot_tier import tier_config
from service.engine.factory import EngineConfig
from service.engine.messages import EngineInfo
from service.engine.protocol import EngineClient
from service.settings import Settings

if TYPE_CHECKING:
    from service.engine.remote.supervisor import EngineSupervisor

FLEET_START_S = 600.0


def engine_config(settings: Settings) -> EngineConfig:
    """What the engine needs to know of the settings. A fake engine has no model: its tokens are bytes."""
    return EngineConfig(
        store_dir=str(settings.store_dir),
        engine=settings.engine,
        model_dir="" if settings.engine == "fake" else str(settings.model_dir),
        kv_type=settings.kv_type,
        compute_dtype=settings.compute_dtype,
        disk_budget_nbytes=settings.snapshot_budget_bytes or None,
        free_floor_nbytes=settings.free_floor_bytes,
        tiers=tier_config(settings),
        resident_budget_nbytes=settings.resident_bytes,
        host_budget_nbytes=settings.host_bytes,
        max_context=settings.max_context,
        max_batch=settings.max_batch,
        threads=settings.threads,
        fetch_rounds=settings.fetch_rounds,
        watch_answers=settings.citation_attention,
        speculation=settings.speculation,
        draft_model_dir=str(settings.draft_model_dir or ""),
        gpu_reserve_nbytes=settings.gpu_reserve_bytes,
        attention_backend=settings.attention_backend,
        product=settings.product,
        offload=settings.offload,
        # Answers have been ended by then; SIGTERM to exit must stay well under ten seconds.
        drain_s=min(2.0, settings.shutdown_grace_s),
    )


async def start_engine(settings: Settings, prompt_digest: str) -> EngineClient:
    """The workers of the fleet, where there is one; else a child process with the model, started again when it dies.
    Of the workers those that have the tokenizer and the prompt of `prompt_digest` (`Prompts.digest`), by which this
    process makes tokens. Returns once it answers. Raises EngineLost, and FleetSettings for an address that is none."""
    if settings.fleet_url:
        from service.engine.fleet.client import FleetClient

        def understands(info: EngineInfo) -> bool:
            return settings.engine == "fake" or prompt_digest == digest_of_prompt(**info.fingerprint)

        fleet = FleetClient(settings.fleet_url, heartbeat_s=settings.fleet_heartbeat_s, understands=understands)
        await fleet.start(FLEET_START_S)
        return fleet
    return await start_supervised(settings)


async def start_supervised(settings: Settings) -> "EngineSupervisor":
    """A child process with the model. Returns once it answers."""
    from service.engine.remote.supervisor import EngineSupervisor

    engine = EngineSupervisor(engine_config(settings), silent_s=settings.engine_timeout_s)
    await engine.start()
    return engine


async def open_engine(settings: Settings) -> EngineClient:
    """The model in this process: no server, no supervision. Raises ModelError, OSError, ValueError."""
    from service.engine.local import LocalEngine

    return await LocalEngine.open(engine_config(settings))
