"""`/health`."""

import msgspec
from litestar import Controller, Response, get
from litestar.di import NamedDependency

from service.api.problems import problem_responses
from service.core.services import Services
from service.errors import Unavailable


class LiveBody(msgspec.Struct, frozen=True):
    status: str


class ReadyBody(msgspec.Struct, frozen=True):
    """`engine_ms`: how long one token took just now. `draft_model`: the one that guesses beside `model`, if any."""

    status: str
    engine: str
    model: str
    engine_ms: float
    draft_model: str | None = None


class HealthController(Controller):
    path = "/health"
    tags = ("operations",)
    opt = {"public": True}  # noqa: RUF012 - Litestar reads this class attribute

    @get("/live")
    async def live(self) -> LiveBody:
        """The process answers."""
        return LiveBody("live")

    @get("/ready", responses=problem_responses(503))
    async def ready(self, services: NamedDependency[Services]) -> Response[ReadyBody]:
        """The engine decoded a token, the database answers and the disk has room; 503 says which does not."""
        health = await services.readiness.check()
        if health.problems or health.engine_ms is None:
            detail = " ".join(f"{part}: {what}" for part, what in health.problems.items())
            raise Unavailable(detail, code="not_ready")
        info = services.engine.info
        body = ReadyBody("ready", info.engine, info.model_name, round(health.engine_ms, 3), info.draft_model or None)
        return Response(body, headers={"Cache-Control": "no-store"})
