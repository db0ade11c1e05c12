"""What a client sees when something goes wrong: exception class -> status, type, code, headers.

One table. The body always has the four keys of the OpenAI shape, and never another tenant's name,
a secret or a stack.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from engine.errors import (
    ConfigError,
    EngineStoppedError,
    GrammarError,
    NeverFitsError,
    TemplateError,
)
from gateway.ratelimits import (
    estimate_headers,
    limit_headers,
    refusal_headers,
    refusal_message,
)
from tenants.errors import (
    DuplicateRequestError,
    KeyRefusedError,
    LimitExceededError,
    NeverFitsLimitError,
    StoreUnavailableError,
)
from tenants.policy import Metric

# A client that retries sooner than this only adds load to a gateway that is full or stopping.
RETRY_SECONDS = 5
DEADLINE_EXCEEDED = "deadline_exceeded"  # a code that the ledger knows too


class GatewayError(Exception):
    """Base of all errors of the gateway; never raised itself."""


class InvalidRequestError(GatewayError):
    """The request cannot be served as it is written. `param` names the field at fault."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnsupportedParameterError(InvalidRequestError):
    """A field of the OpenAI API that would change the answer is not supported here (yet)."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param, code="unsupported_parameter")


class ContextLengthError(InvalidRequestError):
    """Prompt and output together do not fit in the model's context."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class InvalidKeyError(GatewayError):
    """The request carries no API key, or something that cannot be one."""


class ModelNotFoundError(GatewayError):
    """The request names a model that is not served here."""


class RequestNotFoundError(GatewayError):
    """No such request of this tenant's is remembered; whether another has one is not told."""


class UnsupportedMediaTypeError(GatewayError):
    """The body is declared to be something other than JSON."""


class BodyTooLargeError(GatewayError):
    """The body has more bytes than the gateway reads, counted while it arrives."""


class BodyTimeoutError(GatewayError):
    """The body did not arrive in time."""


class EngineNotReadyError(GatewayError):
    """The engine is starting, draining, stalled or failed. Raised before any work is done."""


class GenerationFailedError(GatewayError):
    """The engine failed on this request after it was admitted."""


class GenerationAbortedError(GatewayError):
    """The request was ended by the server, for example because it is shutting down."""


class QueueTimeoutError(GatewayError):
    """The request waited for the engine as long as its class may, and never began."""


class DeadlineExceededError(GatewayError):
    """The request's own deadline has passed, or is expected to pass before its first token."""

    def __init__(self, message: str, *, estimated_seconds: float | None = None) -> None:
        super().__init__(message)
        self.estimated_seconds = estimated_seconds  # to the first token, from its arrival on


class ClientGoneError(GatewayError):
    """The client closed the connection. Nobody reads the response."""


class SlowReaderError(GatewayError):
    """A client stopped reading its stream. Its connection is cut."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One row of the table. `message` None means the exception's own text is fit for clients."""

    status: int
    type: str
    code: str | None
    message: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Status, headers and OpenAI body of one error."""

    status: int
    headers: Mapping[str, str]
    body: dict[str, dict[str, str | None]]


_INVALID = "invalid_request_error"
_UNAVAILABLE = "service_unavailable_error"
_LATER = {"retry-after": str(RETRY_SECONDS), "retry-after-ms": str(RETRY_SECONDS * 1000)}
_KEY_ROW = ErrorRow(
    401,
    _INVALID,
    "invalid_api_key",
    "Incorrect or missing API key. Send it as 'Authorization: Bearer hr_...'.",
    {"www-authenticate": "Bearer"},
)
_BUSY_ROW = ErrorRow(
    503,
    _UNAVAILABLE,
    "server_is_overloaded",
    "The engine accepts no work at this moment. Try again later.",
    _LATER,
)

_INTERNAL_ROW = ErrorRow(
    500, "server_error", "internal_error", "The server had an error processing this request."
)

TABLE: Mapping[type[Exception], ErrorRow] = {
    InvalidRequestError: ErrorRow(400, _INVALID, None),
    InvalidKeyError: _KEY_ROW,
    # One body for unknown, revoked, expired and suspended: an outsider learns nothing.
    KeyRefusedError: _KEY_ROW,
    ModelNotFoundError: ErrorRow(404, _INVALID, "model_not_found"),
    RequestNotFoundError: ErrorRow(404, _INVALID, "request_not_found"),
    UnsupportedMediaTypeError: ErrorRow(415, _INVALID, "unsupported_media_type"),
    BodyTooLargeError: ErrorRow(413, _INVALID, "request_too_large"),
    BodyTimeoutError: ErrorRow(408, "timeout", "request_timeout"),
    TemplateError: ErrorRow(400, _INVALID, "invalid_value"),
    GrammarError: ErrorRow(400, _INVALID, "invalid_grammar"),
    NeverFitsError: ErrorRow(400, _INVALID, "context_length_exceeded"),
    NeverFitsLimitError: ErrorRow(
        429, "tokens", "request_too_large_for_limit", headers={"x-should-retry": "false"}
    ),
    # What the operator set for this tenant does not fit this engine; the log says what.
    ConfigError: ErrorRow(
        503,
        _UNAVAILABLE,
        "server_misconfigured",
        "The server's settings for this key cannot be met. Retrying does not help: tell its "
        "operator.",
        {"x-should-retry": "false"},
    ),
    LimitExceededError: ErrorRow(429, "rate_limit_error", "rate_limit_exceeded"),
    QueueTimeoutError: ErrorRow(429, "rate_limit_error", "rate_limit_exceeded", headers=_LATER),
    StoreUnavailableError: ErrorRow(
        503,
        _UNAVAILABLE,
        "policy_store_unavailable",
        "The policy store cannot be reached at this moment. Try again later.",
        _LATER,
    ),
    EngineNotReadyError: _BUSY_ROW,
    EngineStoppedError: _BUSY_ROW,
    GenerationAbortedError: ErrorRow(
        503,
        _UNAVAILABLE,
        "server_is_overloaded",
        "The server ended this request before it was complete. Try again later.",
        _LATER,
    ),
    GenerationFailedError: ErrorRow(
        500, "server_error", "engine_error", "The engine failed on this request."
    ),
    # The deadline was the client's own: its SDK must not try again by itself.
    DeadlineExceededError: ErrorRow(
        504, "timeout", DEADLINE_EXCEEDED, headers={"x-should-retry": "false"}
    ),
    ClientGoneError: ErrorRow(499, _INVALID, "client_closed_request", "Client closed request."),
    ClientDisconnect: ErrorRow(499, _INVALID, "client_closed_request", "Client closed request."),
    HTTPException: ErrorRow(400, _INVALID, None),
    # Ids are made here: the client has done nothing wrong, and a retry gets another one.
    DuplicateRequestError: _INTERNAL_ROW,
    Exception: _INTERNAL_ROW,
}


def answer(error: Exception) -> ErrorAnswer:
    """The row of the nearest class in the error's ancestry, filled with what the error knows."""
    row = next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)
    status, kind, code = row.status, row.type, row.code
    message = row.message or str(error)
    headers = dict(row.headers)
    if isinstance(error, InvalidRequestError):
        code = error.code
    elif isinstance(error, LimitExceededError):
        kind = _LIMIT_TYPES.get(error.metric, kind)
        message = refusal_message(error)
        headers |= refusal_headers(error)
    elif isinstance(error, NeverFitsLimitError) and error.metric == Metric.CONTEXT_TOKENS:
        status, kind, code, headers = 400, _INVALID, "context_length_exceeded", {}
    elif isinstance(error, NeverFitsLimitError):
        headers |= limit_headers(error.limits)
    elif isinstance(error, DeadlineExceededError) and error.estimated_seconds is not None:
        headers |= estimate_headers(error.estimated_seconds)
    elif isinstance(error, HTTPException):
        status, code = error.status_code, _HTTP_CODES.get(error.status_code)
        headers |= error.headers or {}
        message = error.detail
    return ErrorAnswer(status, headers, body(message, kind, code, _param(error)))


def body(
    message: str, kind: str, code: str | None, param: str | None = None
) -> dict[str, dict[str, str | None]]:
    """The OpenAI error body: always these four keys."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def error_response(request: Request, error: Exception) -> Response:
    """The exception handler of every class in the table."""
    if isinstance(error, HTTPException) and error.status_code in _HTTP_CODES:
        verb = "Unknown request URL" if error.status_code == 404 else "Method not allowed"
        error = HTTPException(
            error.status_code, f"{verb}: {request.method} {request.url.path}", error.headers
        )
    said = answer(error)
    return JSONResponse(said.body, said.status, dict(said.headers))


def exception_handlers() -> dict[Any, Any]:
    """The table as Starlette takes it; plain Exception is left to the outermost middleware."""
    return {cls: error_response for cls in TABLE if cls is not Exception}


def _param(error: Exception) -> str | None:
    if isinstance(error, TemplateError):
        return "messages"
    return getattr(error, "param", None)


_LIMIT_TYPES: Mapping[str, str] = {Metric.REQUESTS: "requests", Metric.TOKENS_TOTAL: "tokens"}
_HTTP_CODES = {404: "unknown_url", 405: "method_not_supported"}
