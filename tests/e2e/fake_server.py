"""`preread serve` with a fake engine in its child process: ``fake_server.py '{"fake_script": [97, 256]}'``.

The argument has fields of `EngineConfig`. All else is the product: settings, API, database, supervisor, host,
scheduler, detokenizer, store.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

from service.collector import starting

with starting():
    from service.core.adapters import Given
    from service.core.prompts import fake_prompts, load_prompts
    from service.core.snapshot_tier import tier_config
    from service.engine.factory import EngineConfig
    from service.engine.remote.supervisor import EngineSupervisor
    from service.logs import configure_logging
    from service.serve import make_server
    from service.settings import Settings


async def serve(options: dict[str, Any]) -> None:
    """Serve until SIGTERM; the engine starts before the application and ends after it."""
    settings = Settings(port=0, engine="fake")
    configure_logging(settings)
    model_dir = options.get("model_dir")
    prompts = load_prompts(Path(model_dir)) if model_dir else fake_prompts()
    engine = EngineSupervisor(config_of(settings, options), silent_s=settings.engine_timeout_s)
    # uvicorn hands the signal on when it is done, which must not end the process before the engine.
    signal.signal(signal.SIGTERM, lambda *_: None)
    await engine.start()
    try:
        server, listening = make_server(settings, Given(engine=engine, prompts=prompts))
        await server.serve(sockets=[listening])
    finally:
        await engine.close()


def config_of(settings: Settings, options: dict[str, Any]) -> EngineConfig:
    own = {
        "engine": "fake",
        "store_dir": str(settings.store_dir),
        "disk_budget_nbytes": settings.snapshot_budget_bytes or None,
        "free_floor_nbytes": settings.free_floor_bytes,
        "max_batch": settings.max_batch,
        "kv_type": settings.kv_type,
        "tiers": tier_config(settings),
    }
    return EngineConfig(**own | options)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
