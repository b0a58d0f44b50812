"""What the API server's answers mean to the operator."""

from __future__ import annotations

from rljob_operator.errors import OperatorError
from rljob_operator.raw_json import JsonObject, integer_at, text_at

NOT_FOUND, CONFLICT, TOO_MANY_REQUESTS, SERVER_ERROR = 404, 409, 429, 500
UNAUTHORIZED, FORBIDDEN, GONE = 401, 403, 410
STRICT_DECODING = "strict decoding error"
"""How an API server begins its words about fields that the definition of a kind does not have."""


class KubeError(OperatorError):
    """A request that did not do what was asked."""


class NotFoundError(KubeError):
    """There is no such object."""


class ResourceTypeMissingError(KubeError):
    """The API server does not know this kind of object: its CustomResourceDefinition is not installed."""


class ConflictError(KubeError):
    """The object was changed, or is another one, since it was read."""


class AlreadyExistsError(KubeError):
    """An object of this name exists."""


class RefusedError(KubeError):
    """The API server understood and refused: admission, validation, quota or permissions. Holds its words."""


class UnknownFieldError(RefusedError):
    """The API server's definition of this kind of object lacks a field that was sent."""


class ForbiddenError(RefusedError):
    """The operator's role does not allow to read this."""


class ExpiredError(KubeError):
    """The rest of a listing is no longer there: it has to be begun anew."""


class DefinitionOutdatedError(KubeError):
    """The CustomResourceDefinition of RLJobs is older than this operator: it dropped what was written."""


class UnavailableError(KubeError):
    """The API server could not be reached, is overloaded or failed; the same request may work later."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        self.retry_after_seconds = retry_after_seconds
        """How long the server asked to be left alone."""
        super().__init__(message)


def error_of(what: str, status: int, body: JsonObject, text: str, retry_after: str, is_read: bool = False) -> KubeError:
    """The error for an answer of 400 or more. `what`: the request, for the message; `body`: its Status object, empty
    where the answer is not JSON; `text`: the answer as it came."""
    words = text_at(body, "message") or text.strip()[:500] or "no explanation"
    message = f"{what}: {words} (HTTP {status})"
    if status == NOT_FOUND:
        # For an unknown kind the answer is plain text or a Status without the name of an object.
        named = text_at(body, "reason") == "NotFound" and text_at(body, "details", "name")
        return NotFoundError(message) if named else ResourceTypeMissingError(message)
    if status == CONFLICT:
        return AlreadyExistsError(message) if text_at(body, "reason") == "AlreadyExists" else ConflictError(message)
    if status in (UNAUTHORIZED, TOO_MANY_REQUESTS) or status >= SERVER_ERROR:
        return UnavailableError(message, _seconds(retry_after) or integer_at(body, "details", "retryAfterSeconds") or 0)
    if status == GONE:
        return ExpiredError(message)
    if status == FORBIDDEN and is_read:
        return ForbiddenError(words)
    return UnknownFieldError(words) if STRICT_DECODING in words else RefusedError(words)


def _seconds(text: str) -> float:
    """Of a Retry-After header; 0 for a date, which API servers do not send."""
    return float(text) if text.isascii() and text.isdecimal() else 0.0
