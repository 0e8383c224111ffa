"""JSON bodies of requests, with every way in which they can be wrong told to the client."""

from typing import Any

from litestar import Request
from litestar.exceptions import InternalServerException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.types import Empty

from service.errors import Malformed, TooLarge, Unsupported


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
            return await super().json()
        except RecursionError:
            raise Malformed("The JSON is nested too deeply.") from None
