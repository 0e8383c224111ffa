"""`/metrics` for Prometheus. Labels come from closed sets: route templates, methods, status codes."""

from collections.abc import Iterator

from litestar import Controller, Response, get
from litestar.di import NamedDependency
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from service.api.principal import FOR_METRICS
from service.api.problems import problem_responses
from service.core.services import Services
from service.core.statuses import CANCELLED, FAILED, ORDER, READY
from service.engine.messages import EngineStats
from service.engine.protocol import EngineClient, EngineLost

_METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "PUT", "DELETE", "OPTIONS"})
_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 120)


class Metrics:
    """One registry per application, so that two in one process do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self._requests = Counter("preread_http_requests", "Requests", labels, registry=self.registry)
        self._seconds = Histogram(
            "preread_http_request_seconds", "Time to the end of the response", ("method", "route"),
            registry=self.registry, buckets=_SECONDS,
        )  # fmt: skip
        self._documents = Gauge("preread_documents", "Documents", ("status",), registry=self.registry)
        self._jobs = Gauge("preread_jobs", "Documents being made or waiting for it", registry=self.registry)
        self.engine = EngineCollector()
        self.registry.register(self.engine)

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        method = method if method in _METHODS else "OTHER"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    async def refresh(self, services: Services) -> None:
        """Ask for what is only known by asking."""
        async with services.db.reading() as uow:
            counts = await uow.documents.counts()
        for status in (*ORDER, READY, FAILED, CANCELLED):
            self._documents.labels(status).set(counts.get(status, 0))
        self._jobs.set(services.jobs.running)
        self.engine.stats = await _stats(services.engine)


class EngineCollector(Collector):
    """The engine's own counters: `*_total` begin at zero again when its process was restarted."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("preread_engine_up", "Whether the engine answers", value=float(self.stats is not None))
        if self.stats is None:
            return
        for name in self.stats.__struct_fields__:
            if name == "documents":
                continue
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(
                f"preread_engine_{name.removesuffix('_total')}",
                name.replace("_", " "),
                getattr(self.stats, name),
            )


class MetricsController(Controller):
    path = "/metrics"
    tags = ("operations",)

    @get(media_type=CONTENT_TYPE_LATEST, opt=FOR_METRICS, responses=problem_responses())
    async def metrics(self, services: NamedDependency[Services], metrics: NamedDependency[Metrics]) -> Response[bytes]:
        """Metrics in the Prometheus text format."""
        await metrics.refresh(services)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _stats(engine: EngineClient) -> EngineStats | None:
    try:
        return await engine.stats()
    except EngineLost:
        return None
