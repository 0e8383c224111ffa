"""`/v1/models`: the model that is served."""

from typing import Literal

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from service.api.openai.errors import on_openai_error, openai_responses
from service.core.chats.opening import OpenChats
from service.core.services import Services
from service.errors import NotFound


class ModelBody(msgspec.Struct, frozen=True):
    """`created`: when it was imported, Unix time."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "preread"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelBody]
    object: Literal["list"] = "list"


class ModelController(Controller):
    """There is one; all addresses of a request name it."""

    path = "/v1/models"
    tags = ("openai",)
    exception_handlers = {Exception: on_openai_error}  # noqa: RUF012 - Litestar reads this class attribute

    @get(responses=openai_responses())
    async def listing(self, services: NamedDependency[Services]) -> ModelList:
        """The models that can be asked for."""
        return ModelList([_body(services.chats)])

    @get("/{model:str}", responses=openai_responses())
    async def detail(self, services: NamedDependency[Services], model: FromPath[str]) -> ModelBody:
        """One of them."""
        require_model(services, model)
        return _body(services.chats)


def require_model(services: Services, model: str) -> None:
    """Raises NotFound (``model_not_found``)."""
    if model != services.chats.model:
        raise NotFound(
            f"The model `{model[:80]}` is not served here; `{services.chats.model}` is.",
            code="model_not_found",
            param="model",
        )


def _body(chats: OpenChats) -> ModelBody:
    return ModelBody(chats.model, chats.model_made_at)
