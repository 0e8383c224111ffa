"""JSON bodies of requests, with every way in which they can be wrong told to the client."""

from typing import Any

import msgspec
from litestar import Request
from litestar.exceptions import InternalServerException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.types import Empty

from service.errors import Invalid, Malformed, TooLarge, Unsupported


class ApiRequest(Request[Any, Any, Any]):
    """What handlers get; `json` is what Litestar reads a handler's body with."""

    async def body(self) -> bytes:
        """Raises TooLarge, and Malformed when the client leaves before its body is here, or sends none to a handler
        that must have one."""
        try:
            body = await super().body()
        except InternalServerException:
            raise Malformed("The client left before the whole body had arrived.") from None
        except RequestEntityTooLarge:
            limit = self.route_handler.resolve_request_max_body_size()
            raise TooLarge(f"The body is larger than {limit:,} bytes.") from None
        data = self.route_handler.parsed_data_field
        if not body and data is not None and data.default is Empty:
            raise Malformed("The request has no body: send JSON.")
        return body

    async def json(self) -> Any:
        """Raises Unsupported for another content type than JSON, Malformed for what is not JSON."""
        kind = self.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Unsupported("Send the body as JSON, with the content type application/json.")
        try:
            found = await super().json()
            self._require_as_meant(found)
        except RecursionError:
            raise Malformed("The JSON is nested too deeply.") from None
        return found

    def _require_as_meant(self, found: Any) -> None:
        """Litestar takes 0 for false and "5" for 5, also in JSON. What it refuses itself, it says itself; 5.0 is 5."""
        field = self.route_handler.parsed_data_field
        if field is None:
            return
        try:
            msgspec.convert(_whole(found), field.annotation)
        except msgspec.ValidationError as error:
            try:
                msgspec.convert(found, field.annotation, strict=False)
            except msgspec.ValidationError:
                return
            what, _, where = str(error).partition(" - at `$")
            raise Invalid(f"{what}.", param=where.strip(".`") or None) from None


def _whole(found: Any) -> Any:
    """Numbers without a fraction as JSON Schema sees them: they are integers, however they are written."""
    if isinstance(found, float) and found.is_integer():
        return int(found)
    if isinstance(found, dict):
        return {name: _whole(value) for name, value in found.items()}
    return [_whole(value) for value in found] if isinstance(found, list) else found
