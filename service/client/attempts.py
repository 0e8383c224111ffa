"""When something is tried again, and how long is waited before."""

import random
from dataclasses import dataclass

import httpx

from service.client.calls import Call
from service.client.errors import APIError, RateLimited, Unavailable, failed_connection

_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 8.0
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_NEVER_BETTER = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


@dataclass(frozen=True, slots=True)
class Patience:
    """`retries`: how often a call is sent again. `resume_s`: how long a lost stream is taken up again without any news.
    `longest_retry_after_s`: a server that wants a longer pause is not waited for."""

    retries: int = 3
    resume_s: float = 120.0
    longest_retry_after_s: float = 30.0


class Attempts:
    """The attempts of one call. Both methods give the seconds to wait, or raise the error when that is the end."""

    def __init__(self, call: Call, patience: Patience, url: str) -> None:
        self._call = call
        self._patience = patience
        self._url = url
        self._n = 0

    def after_loss(self, error: httpx.TransportError) -> float:
        """The connection was not made, or was lost: then nobody knows what was done. Raises ConnectionFailed."""
        safe = isinstance(error, _NOT_SENT) or (self._call.is_repeatable and not isinstance(error, _NEVER_BETTER))
        if not safe or not self._again():
            raise failed_connection(error, self._url) from error
        return backoff_s(self._n)

    def after_refusal(self, error: APIError) -> float:
        """Nothing is done for who is told to come later; an engine or a database that went away may have done it.
        Raises the error."""
        later = isinstance(error, RateLimited) or (isinstance(error, Unavailable) and self._call.is_repeatable)
        wait_s = error.retry_after_s or 0.0
        rewindable = self._call.source is None or self._call.source.is_rewindable
        if not later or not rewindable or wait_s > self._patience.longest_retry_after_s or not self._again():
            raise error
        return max(wait_s, backoff_s(self._n))

    def _again(self) -> bool:
        self._n += 1
        return self._n <= self._patience.retries


def backoff_s(n: int) -> float:
    """Before attempt `n`: twice as long each time, and not at the same moment as everybody else."""
    return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(n - 1, 10)) * random.uniform(0.5, 1.0)  # noqa: S311
