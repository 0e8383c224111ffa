"""How both clients reach the server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from ssl import SSLContext
from typing import Any, TypeVar

import httpx
import msgspec

from service.client.attempts import Patience
from service.client.calls import Call
from service.client.following import decoded
from service.client.models import Uploaded

T = TypeVar("T")
DEFAULT_TIMEOUT = httpx.Timeout(60.0, connect=10.0)
"""A stream that is quiet has a comment every 15 seconds, so that more than that is enough to read."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Options of a client. Raises ValueError for an address or a key that cannot be one."""

    url: str
    key: str | None = None
    timeout: float | httpx.Timeout = field(default_factory=lambda: DEFAULT_TIMEOUT)
    patience: Patience = field(default_factory=Patience)
    verify: bool | SSLContext = True
    headers: Mapping[str, str] = field(default_factory=dict)
    transport: Any = None

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{self.url!r} is no address: {error}.") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"{self.url!r} is no address of a server: write http://host:port or https://host.")
        if self.key is not None and not (self.key and self.key.isascii() and self.key.isprintable()):
            raise ValueError("A key has printable characters of ASCII only.")

    def options(self) -> dict[str, Any]:
        """Of an httpx client."""
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {
            "base_url": self.url,
            "headers": {"User-Agent": "preread-client", **self.headers, **key},
            "timeout": self.timeout,
            "verify": self.verify,
            "transport": self.transport,
            # A proxy of the environment cannot reach what listens on this machine.
            "trust_env": not _is_here(httpx.URL(self.url).host),
        }


def request_options(call: Call) -> dict[str, Any]:
    """Of an httpx request."""
    options: dict[str, Any] = {"params": call.params or None, "headers": dict(call.headers)}
    if call.source is not None:
        # No content type: the server finds the kind by itself, and a guess would say nothing to it.
        options["files"] = {"file": (call.source.filename, call.source, "application/octet-stream")}
        options["data"] = dict(call.form)
    elif call.body is not None:
        options["json"] = call.body
    return options


def result_of(call: Call[T], response: httpx.Response) -> T:
    """What a success says. Raises UnexpectedResponse."""
    if call.result is type(None):
        return None  # type: ignore[return-value]
    if call.result is bytes:
        return response.content  # type: ignore[return-value]
    result = decoded(response.content, call.result)
    if isinstance(result, Uploaded):
        return msgspec.structs.replace(result, created=response.status_code == 202)
    return result


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
