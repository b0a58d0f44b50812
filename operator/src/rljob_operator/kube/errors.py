"""Typed errors for the API server's error responses."""

from __future__ import annotations

import re

from rljob_operator.errors import OperatorError
from rljob_operator.raw_json import JsonObject, integer_at, objects_at, text_at

NOT_FOUND, CONFLICT, TOO_MANY_REQUESTS, SERVER_ERROR = 404, 409, 429, 500
UNAUTHORIZED, FORBIDDEN, GONE, UNPROCESSABLE = 401, 403, 410, 422
STRICT_DECODING = "strict decoding error"
"""Part of the API server's message about fields that the definition of a kind of object does not have."""

ETCD_TOO_LARGE = "etcdserver: request is too large"
"""Part of the message of a response of status 500 for an object that exceeds etcd's limit."""


class KubeError(OperatorError):
    """A request to the API server failed."""


class NotFoundError(KubeError):
    """There is no such object."""


class ResourceTypeMissingError(KubeError):
    """The API server does not know this kind of object: its CustomResourceDefinition is not installed."""


class ConflictError(KubeError):
    """The object was changed or replaced since it was read."""


class AlreadyExistsError(KubeError):
    """An object with this name already exists."""


class RefusedError(KubeError):
    """The API server rejected the request: admission, validation, quota or permissions. The message is the server's."""


class InvalidFieldError(RefusedError):
    """The API server rejected the values of fields, and would reject the same request again."""

    def __init__(self, message: str, fields: tuple[str, ...]) -> None:
        self.fields = fields
        """Paths of these fields, such as `spec.rayVersion`; not empty."""
        super().__init__(message)


class UnknownFieldError(RefusedError):
    """The API server's definition of this kind of object lacks fields that were sent."""

    def __init__(self, message: str) -> None:
        self.fields = tuple(re.findall(r'unknown field "([^"]+)"', message))
        """Paths of these fields, such as `spec.authOptions`; empty if the message does not name them."""
        super().__init__(message)


class ForbiddenError(RefusedError):
    """The operator's role does not allow this read."""


class ExpiredError(KubeError):
    """The continue token of a listing has expired: the listing must start again."""


class TooLongError(KubeError):
    """The response is too long to be read."""


class StatusUnreadableError(KubeError):
    """The status of a job cannot be parsed, so the operator does not know what the job has done."""


class StatusNotWrittenError(KubeError):
    """The API server rejects a new status of a job."""


class DefinitionOutdatedError(KubeError):
    """The CustomResourceDefinition of RLJobs is older than this operator: the API server dropped
    fields that were written."""


class UnavailableError(KubeError):
    """The request cannot be executed now; the same request may succeed later. For example, the API server is
    unreachable, overloaded or failing, does not accept the token, or has sent a response that cannot be used."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        self.retry_after_seconds = retry_after_seconds
        """The server's Retry-After; 0 if it sent none."""
        super().__init__(message)


class TimedOutError(UnavailableError):
    """The API server did not respond in time."""


def error_of(what: str, status: int, body: JsonObject, text: str, retry_after: str, is_read: bool = False) -> KubeError:
    """The error for a response of status 400 or higher.

    Args:
        what: The request, for the message, such as `get pods /api/v1/pods`.
        status: The HTTP status.
        body: The response's Status object; empty if the response is not JSON.
        text: The response as received.
        retry_after: The Retry-After header; empty if there is none.
        is_read: Whether the request only reads.
    """
    explanation = text_at(body, "message") or text.strip()[:500] or "no explanation"
    message = f"{what}: {explanation} (HTTP {status})"
    if status == NOT_FOUND:
        # For an unknown kind, the response is plain text or a Status without the name of an object.
        names_object = text_at(body, "reason") == "NotFound" and text_at(body, "details", "name")
        return NotFoundError(message) if names_object else ResourceTypeMissingError(message)
    if status == CONFLICT:
        return AlreadyExistsError(message) if text_at(body, "reason") == "AlreadyExists" else ConflictError(message)
    is_too_large = ETCD_TOO_LARGE in explanation
    if status in (UNAUTHORIZED, TOO_MANY_REQUESTS) or (status >= SERVER_ERROR and not is_too_large):
        return UnavailableError(message, _seconds(retry_after) or integer_at(body, "details", "retryAfterSeconds") or 0)
    if status == GONE:
        return ExpiredError(message)
    if status == FORBIDDEN and is_read:
        return ForbiddenError(explanation)
    if STRICT_DECODING in explanation:
        return UnknownFieldError(explanation)
    # An admission policy may also respond with 422. It names no field, and the administrator may change the policy.
    fields = tuple(text_at(each, "field") for each in objects_at(body, "details", "causes") if text_at(each, "field"))
    is_invalid = status == UNPROCESSABLE and fields
    return InvalidFieldError(explanation, fields) if is_invalid else RefusedError(explanation)


def _seconds(text: str) -> float:
    """The seconds in a Retry-After header; 0 for a date, which API servers do not send."""
    return float(text) if text.isascii() and text.isdecimal() else 0.0
