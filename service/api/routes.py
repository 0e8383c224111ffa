"""Every controller of the API."""

from litestar import Controller

from service.api.documents import DocumentController
from service.api.health import HealthController
from service.api.metrics import MetricsController

CONTROLLERS: list[type[Controller]] = [DocumentController, HealthController, MetricsController]
