"""Whether a question would be answered now: the engine decodes, the database answers, the disk has room."""

import asyncio
from dataclasses import dataclass, field

from service.core import datadir
from service.core.clock import Clock
from service.db.engine import Database
from service.engine.protocol import EngineClient
from service.errors import ServiceError
from service.settings import Settings

CHECK_S = 10.0
KEPT_S = 1.0
_RESTARTING = "It is starting, or it was lost and is being restarted."
_NO_WORKER = (
    "No worker that this server can use is there, or Redis does not answer: start `preread worker` with the same "
    "PREREAD_MODEL."
)


@dataclass(frozen=True, slots=True)
class Health:
    """`problems`: part -> what is wrong with it, empty when all is well. `engine_ms`: of one token."""

    engine_ms: float | None
    problems: dict[str, str] = field(default_factory=dict)


class Readiness:
    """Checks at most once a second, however many ask."""

    def __init__(self, settings: Settings, db: Database, engine: EngineClient, clock: Clock) -> None:
        self._settings = settings
        self._db = db
        self._engine = engine
        self._clock = clock
        self._lock = asyncio.Lock()
        self._last: tuple[float, Health] | None = None

    async def check(self) -> Health:
        async with self._lock:
            now = self._clock.monotonic()
            if self._last is None or now - self._last[0] >= KEPT_S:
                self._last = (now, await self._measure())
            return self._last[1]

    async def _measure(self) -> Health:
        problems: dict[str, str] = {}
        engine_ms = None
        try:
            async with asyncio.timeout(CHECK_S):
                engine_ms = await self._engine.check()
        except TimeoutError:
            problems["engine"] = f"It did not decode a token within {CHECK_S:g} s."
        except Exception:
            problems["engine"] = _NO_WORKER if self._settings.fleet_url and not self._engine.alive else _RESTARTING
        try:
            async with asyncio.timeout(CHECK_S):
                await self._db.ping()
        except Exception:
            problems["database"] = "It does not answer."
        try:
            datadir.check_free(self._settings)
        except ServiceError as error:
            problems["disk"] = error.detail
        return Health(engine_ms, problems)
