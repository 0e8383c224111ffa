"""The OpenAPI description: what Litestar finds in the handlers, completed by what holds for every call.

Bodies are described by msgspec, which reads and writes them: with their limits, and closed where an unknown field is
refused.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from http import HTTPStatus
from typing import Any

import msgspec
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import OpenAPI

from service.api.authentication import OPEN
from service.api.problems import PROBLEM_JSON

_REFERENCE = "#/components/schemas/{name}"
_TEXT, _SECONDS = {"type": "string"}, {"type": "integer", "minimum": 0}
_REQUEST_ID = {"description": "Names the request, in the log too.", "required": True, "schema": _TEXT}
_RETRY_AFTER = {"description": "Seconds until it is worth trying again.", "required": True, "schema": _SECONDS}
_HEADERS: dict[str, dict[str, Any]] = {
    "401": {"WWW-Authenticate": {"description": "What kind of key is wanted.", "required": True, "schema": _TEXT}},
    "429": {"Retry-After": _RETRY_AFTER},
    "503": {"Retry-After": _RETRY_AFTER},
}  # fmt: skip
_OF_BODIES = ("413", "415")
_OF_KEYS = ("401", "429")
"""What only calls have that want a key: the limit of requests is a key's."""


class Description(OpenAPIConfig):
    """What `create_app` gives to Litestar."""

    def to_openapi_schema(self) -> OpenAPI:
        """Its description is completed when it is written."""
        found = super().to_openapi_schema()
        return _Completed(**{each.name: getattr(found, each.name) for each in fields(found)})


@dataclass
class _Completed(OpenAPI):
    def to_schema(self) -> dict[str, Any]:
        schema = super().to_schema()
        components = schema["components"]["schemas"]
        components |= _bodies(components)
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                _complete(path, operation)
        return schema


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Statuses and headers that do not come from the handler, but from what stands around it."""
    responses = operation["responses"]
    if path in OPEN:
        operation["security"] = []
        for status in _OF_KEYS:
            responses.pop(status, None)
        responses.setdefault("403", _problem("403"))
    if "requestBody" in operation:
        _complete_body(operation["requestBody"])
        for status in _OF_BODIES:
            responses.setdefault(status, _problem(status))
    for status, response in responses.items():
        response.setdefault("headers", {}).update({"X-Request-ID": _REQUEST_ID, **_HEADERS.get(status, {})})


def _complete_body(body: dict[str, Any]) -> None:
    """A body that may be null may be left out as well."""
    for content in body["content"].values():
        if any(each.get("type") == "null" for each in content["schema"].get("oneOf", ())):
            body["required"] = False


def _problem(status: str) -> dict[str, Any]:
    reference = {"$ref": _REFERENCE.format(name="Problem")}
    return {"description": HTTPStatus(int(status)).phrase, "content": {PROBLEM_JSON: {"schema": reference}}}


def _bodies(named: dict[str, Any]) -> dict[str, Any]:
    """The bodies among `named` as msgspec describes them; those whose name two have stay as they are."""
    found = [kind for kind in _structs(msgspec.Struct) if kind.__name__ in named]
    times = Counter(kind.__name__ for kind in found)
    _, schemas = msgspec.json.schema_components(
        [kind for kind in found if times[kind.__name__] == 1], ref_template=_REFERENCE
    )
    return schemas


def _structs(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        if kind.__module__.startswith("service.api."):
            yield kind
        yield from _structs(kind)
