"""Every controller of the API."""

from litestar import Controller

from service.api.documents import DocumentController
from service.api.health import HealthController
from service.api.metrics import MetricsController
from service.api.openai.chat import ChatController
from service.api.openai.files import FileController
from service.api.openai.models import ModelController
from service.api.openai.responses import ResponseController
from service.api.openai.uploads import UploadController
from service.api.questions import QuestionController
from service.api.sessions import SessionController
from service.api.shares import DocumentShareController, SessionShareController

CONTROLLERS: list[type[Controller]] = [
    DocumentController,
    SessionController,
    QuestionController,
    DocumentShareController,
    SessionShareController,
    HealthController,
    MetricsController,
    ModelController,
    FileController,
    UploadController,
    ChatController,
    ResponseController,
]
