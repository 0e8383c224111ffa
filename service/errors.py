"""Errors of the use cases; they know no HTTP. `service.api.problems` maps each class to a status and a type.

ServiceError                code, detail (says what to do)
├── Unauthenticated         no key, or one that is not valid
├── NotFound                unknown id, or not yours
├── Forbidden               meant for another server, sent by another site's page, or more than a key or a share allows
├── Invalid                 a value that cannot be used; `param` names it
│   └── TooLong             does not fit the model's context; the numbers are in the detail
├── Malformed               a body that is not what its content type says
├── Conflict                the state forbids it now (document not ready, session busy)
├── Gone                    the stream or its events are no longer kept
├── TooLarge                an upload above the limit
├── Unsupported             a kind of file this version cannot read
├── Busy                    a bounded queue is full; `retry_after_s`
│   └── LimitReached        the owner's quota, or the rate of requests; the code says which
├── Unavailable             the engine is down or restarting; `retry_after_s`
│   └── DatabaseUnavailable the database is not there, or took too long; nothing was changed
│       └── CommitUnknown   it went away while it was told to keep a change: that may have been kept
└── StorageFull             disk budget, free-space floor, or the operating system refused
"""


class ServiceError(Exception):
    """Base of the errors the service raises on purpose."""

    code = "error"

    def __init__(self, detail: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code or type(self).code
        self.param = param


class Unauthenticated(ServiceError):
    code = "unauthenticated"


class NotFound(ServiceError):
    code = "not_found"


class Forbidden(ServiceError):
    code = "forbidden"


class Invalid(ServiceError):
    code = "invalid"


class TooLong(Invalid):
    code = "context_length_exceeded"


class Malformed(ServiceError):
    code = "bad_request"


class Conflict(ServiceError):
    code = "conflict"


class Gone(ServiceError):
    code = "gone"


class TooLarge(ServiceError):
    code = "too_large"


class Unsupported(ServiceError):
    code = "unsupported_media_type"


class _Retryable(ServiceError):
    def __init__(self, detail: str, *, retry_after_s: int = 1, code: str | None = None) -> None:
        super().__init__(detail, code=code)
        self.retry_after_s = retry_after_s


class Busy(_Retryable):
    code = "queue_full"


class LimitReached(Busy):
    code = "rate_limited"


class Unavailable(_Retryable):
    code = "engine_unavailable"


class DatabaseUnavailable(Unavailable):
    """`place`: where the database should be, for whoever runs the server; its clients are not told."""

    code = "database_unavailable"
    place = ""


class CommitUnknown(DatabaseUnavailable):
    pass


class StorageFull(ServiceError):
    code = "storage_full"
