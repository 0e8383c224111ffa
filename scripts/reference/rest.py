"""The reference of the REST API, from the schema that the server has under /schema."""

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from service.app import create_app
from service.settings import Settings

Json = dict[str, Any]
METHODS = ("get", "post", "put", "patch", "delete")
PAGE = """\
# REST reference

This page is made from the OpenAPI schema by `make docs`: every call, every field. [REST API](rest-api.md) explains
them, with examples. A server has the schema itself under `/schema/openapi.json`.

Each call is sent with `Authorization: Bearer KEY` once there are [API keys](security.md#keys). Every refusal has the
body [`Problem`](#problem); [Errors](rest-api.md#errors) says when there is which.

{calls}

## Bodies

`?` stands behind fields that may be left out or are not always there.

{bodies}
"""


def rest_page() -> str:
    schema = create_app(Settings(data_dir=Path("/nowhere"), engine="fake")).openapi_schema.to_schema()
    tags: dict[str, list[str]] = {}
    for path, operations in sorted(schema["paths"].items(), key=lambda item: _by_depth(item[0])):
        for method in METHODS:
            if method in operations:
                tag = (operations[method].get("tags") or ["other"])[0]
                tags.setdefault(tag, []).append(_call(method, path, operations[method]))
    calls = "\n\n".join(f"## {tag.capitalize()}\n\n" + "\n\n".join(found) for tag, found in tags.items())
    said = _docstrings()
    bodies = [_body(name, body, said.get(name, "")) for name, body in sorted(schema["components"]["schemas"].items())]
    return PAGE.format(calls=calls, bodies="\n\n".join(bodies))


def _by_depth(path: str) -> tuple[str, int, str]:
    """Calls of one thing together, the shorter path first."""
    parts = path.strip("/").split("/")
    return "/".join(parts[:2]), len(parts), path


def _call(method: str, path: str, operation: Json) -> str:
    parts = [f"### `{method.upper()} {path}`", (operation.get("description") or operation.get("summary", "")).strip()]
    parts.append(_table(("parameter", "in", "type", "meaning"), _parameters(operation)))
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = content["schema"]
        if "$ref" in schema or "properties" not in schema:
            parts.append(f"Body: {_type(schema)} ({media}).")
        else:
            parts += [f"Body ({media}):", _fields(schema)]
    parts.append(_table(("status", "body", "meaning"), _successes(operation)))
    if refusals := ", ".join(status for status in sorted(operation["responses"]) if status >= "4"):
        parts.append(f"Refusals: {refusals}.")
    return "\n\n".join(part for part in parts if part)


def _parameters(operation: Json) -> Iterator[tuple[str, ...]]:
    for each in operation.get("parameters", []):
        name = f"`{each['name']}`" + ("" if each.get("required") else "?")
        yield name, each["in"], _type(each["schema"]), each.get("description") or ""


def _successes(operation: Json) -> Iterator[tuple[str, ...]]:
    for status, response in sorted(operation["responses"].items()):
        if status < "4":
            bodies = [_content(media, body["schema"]) for media, body in response.get("content", {}).items()]
            yield status, ", ".join(bodies), response.get("description", "")


def _content(media: str, schema: Json) -> str:
    if media == "text/event-stream":
        return "a stream of events"
    return f"{_type(schema)} ({media})"


def _body(name: str, schema: Json, said: str) -> str:
    return "\n\n".join(part for part in (f"### {name}", said, _fields(schema)) if part)


def _fields(schema: Json) -> str:
    required = set(schema.get("required", ()))
    rows = (
        (f"`{name}`" + ("" if name in required else "?"), _type(field), _meaning(field))
        for name, field in schema.get("properties", {}).items()
    )
    return _table(("field", "type", "meaning"), rows)


def _meaning(field: Json) -> str:
    default = f"Default: `{json.dumps(field['default'])}`." if "default" in field else ""
    return " ".join(part for part in (field.get("description", ""), default) if part)


def _type(schema: Json) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if choices := schema.get("oneOf") or schema.get("anyOf"):
        return " or ".join(dict.fromkeys(_type(choice) for choice in choices))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        kind = " or ".join(kind)
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = {"minimum": "from", "maximum": "to", "maxLength": "up to"}
    limits = [f"{word} {_number(schema[name])}" for name, word in bounds.items() if name in schema]
    form = [schema["format"]] if "format" in schema else []
    return f"{kind} ({', '.join([*form, *limits])})" if form or limits else kind


def _number(value: float) -> str:
    return f"{int(value) if float(value).is_integer() else value:,}"


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = ["| " + " | ".join(re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]) if lines else ""


def _docstrings() -> dict[str, str]:
    """What the API's bodies say of themselves, by their names."""
    found, left = {}, [msgspec.Struct]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if kind.__module__.startswith("service.api") and "__doc__" in vars(kind) and kind.__doc__:
            found[kind.__name__] = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(kind.__doc__))
    return found
