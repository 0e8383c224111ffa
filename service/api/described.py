"""What handlers say of their headers and of responses that are no JSON, for the OpenAPI description."""

from dataclasses import dataclass
from typing import Annotated, Any

from litestar.datastructures import ResponseHeader
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import OpenAPIHeader, OpenAPIMediaType, Operation, Schema
from litestar.openapi.spec.enums import OpenAPIFormat, OpenAPIType
from litestar.params import HeaderParameter

LOCATION = [ResponseHeader("Location", documentation_only=True, required=True, description="Where it is.")]
NOTHING_FOLLOWS = {
    204: ResponseSpec(None, generate_examples=False, description="Nothing follows: this was the last event.")
}
LastEventId = Annotated[
    str | None,
    HeaderParameter(name="Last-Event-ID", description="Id of the last event that came: only what follows is sent."),
]
Range = Annotated[str | None, HeaderParameter(name="Range", description="`bytes=FIRST-LAST`: only these are sent.")]
IfRange = Annotated[
    str | None, HeaderParameter(name="If-Range", description="`Range` holds only for the file with this `ETag`.")
]
_EVENTS = OpenAPIMediaType(
    Schema(
        type=OpenAPIType.OBJECT,
        description="Each of the server-sent events; `data` is JSON.",
        properties={name: Schema(type=OpenAPIType.STRING) for name in ("id", "event", "data")},
        required=["event", "data"],
    )
)
_BYTES = OpenAPIMediaType(Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY))


@dataclass
class EventsOperation(Operation):
    """Answers with a stream of events."""

    def __post_init__(self) -> None:
        _response(self, "200").content = {"text/event-stream": _EVENTS}


@dataclass
class AnswerOperation(Operation):
    """Answers with JSON, or with a stream of events when that is asked for."""

    def __post_init__(self) -> None:
        response = _response(self, "200")
        response.content["text/event-stream"] = _EVENTS
        response.headers = {"Location": _text("The answer's events.")}


@dataclass
class FileOperation(Operation):
    """Answers with the bytes of a file, or with some of them."""

    def __post_init__(self) -> None:
        for status in ("200", "206"):
            response = _response(self, status)
            response.content = {"*/*": _BYTES}
            response.headers = {"ETag": _text("Of these bytes."), "Accept-Ranges": _text("Always `bytes`.")}
        _response(self, "206").headers |= {"Content-Range": _text("Which bytes these are, and of how many.")}  # type: ignore[operator]
        _response(self, "416").headers = {"Content-Range": _text("How many bytes there are.")}


def _text(description: str) -> OpenAPIHeader:
    return OpenAPIHeader(schema=Schema(type=OpenAPIType.STRING), required=True, description=description)


def _response(operation: Operation, status: str) -> Any:
    assert operation.responses is not None
    return operation.responses[status]
