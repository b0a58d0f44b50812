"""Turns error responses of the API server into exceptions with a message for the user."""

from __future__ import annotations

from pydantic import ValidationError

from rljob.errors import (
    ClusterError,
    ClusterUnreachableError,
    ConflictError,
    JobExistsError,
    NotAllowedError,
    ObjectNotFoundError,
    RejectedError,
    RLJobError,
    no_such_job,
)
from rljob.kubernetes_models import Refusal
from rljob.plain_text import one_line
from rljob_api.constants import API_GROUP, API_VERSION
from rljob_api.errors import Problem

API_PATH = f"/apis/{API_GROUP}/{API_VERSION}"
PLURAL = "rljobs"
"""The resource of jobs, in URL paths and error responses."""


def error_of_response(status: int, body: bytes, cluster: str, flags: str) -> RLJobError:
    """The exception for an error response of the API server. If the body is a `Status` object, it has the message, the
    reason and the details; otherwise the whole body is the message."""
    try:
        refusal = Refusal.model_validate_json(body)
    except ValidationError:
        refusal = Refusal(message=body.decode(errors="replace").strip())
    message = one_line(refusal.message) or f"HTTP {status}"
    if status == 401:
        return ClusterError(
            f"{cluster}: the API server rejected the credentials; log in again, or use another context (--context)"
        )
    # Quotas and other admission plugins also respond with 403, but do not name a user.
    if status == 403 and 'User "' in message:
        return NotAllowedError(f"{cluster}: permission denied ({message}); ask for a role as in docs/install.md")
    if status == 404 and refusal.details.kind == PLURAL and refusal.details.name:
        return no_such_job(refusal.details.name, flags)
    if status == 404 and not refusal.details.name:
        return ClusterError(
            f"{cluster}: the API server does not know RLJobs; install the operator (docs/install.md), or select"
            " another cluster with --context"
        )
    if status == 404:
        return ObjectNotFoundError(
            f"{cluster}: the API server rejected the request ({message}); change what this message names"
        )
    if status == 409 and refusal.reason == "AlreadyExists":
        return JobExistsError(refusal.details.name)
    if status == 409:
        return ConflictError(f"{cluster}: {message}")
    if status in (429, 500, 502, 503, 504):
        return ClusterUnreachableError(cluster, message)
    return RejectedError(
        f"{cluster}: the API server rejected the request ({message}); change what this message names",
        # A cause without a field says that further rules were not checked.
        [Problem(cause.field, one_line(cause.message)) for cause in refusal.details.causes if cause.field != "<nil>"],
    )
