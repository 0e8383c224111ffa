"""The use cases, built once at start and handed to the HTTP layer."""

import asyncio
from dataclasses import dataclass, field

from service.core.clock import Clock
from service.db.engine import Database
from service.engine.protocol import EngineClient
from service.settings import Settings


@dataclass(slots=True)
class Services:
    """What a request handler may use. `stopping` is set when the server begins to shut down."""

    settings: Settings
    clock: Clock
    db: Database
    engine: EngineClient
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
