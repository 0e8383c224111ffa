"""`preread worker` with a fake engine of its own making: ``fake_worker.py '{"fake_script": [97, 256]}'``.

The argument has fields of `EngineConfig`. All else is the product.
"""

import asyncio
import json
import sys

from service.core.worker import run_worker
from service.engine.remote.supervisor import EngineSupervisor
from service.logs import configure_logging
from service.settings import Settings
from tests.e2e.fake_server import config_of

if __name__ == "__main__":
    settings = Settings(engine="fake")
    configure_logging(settings)
    # Tests kill engines more often than they fail: the pause before the next start must not grow with that.
    config = config_of(settings, json.loads(sys.argv[1]))
    engine = EngineSupervisor(config, quick_s=1.0, silent_s=settings.engine_timeout_s)
    asyncio.run(run_worker(settings, engine))
