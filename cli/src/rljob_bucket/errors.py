"""The errors of buckets."""

from __future__ import annotations

from enum import StrEnum


class BucketFault(StrEnum):
    """Why a request to a bucket failed."""

    NO_BUCKET = "the bucket does not exist"
    CREDENTIALS = "the credentials are missing or wrong"
    PERMISSION = "access is denied"
    CERTIFICATE = "the certificate of the store is not trusted"
    UNREACHABLE = "the store does not respond"
    OVERLOADED = "the store fails or limits requests at the moment"
    CHANGED = "the file was replaced while it was read"
    NO_CONDITIONAL_WRITES = "the store has replaced the file, so it lacks conditional writes (If-None-Match)"
    OTHER = "the store answers with an error"


_ADVICE = {
    BucketFault.NO_BUCKET: "create the bucket, or correct its name, the endpoint or the region",
    BucketFault.CREDENTIALS: (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_SESSION_TOKEN for temporary credentials (on a"
        " cluster: checkpoint.storage.s3.secret, or an identity of the pods)"
    ),
    BucketFault.PERMISSION: "allow these credentials to list, read, write and delete objects of the bucket",
    BucketFault.CERTIFICATE: (
        "set SSL_CERT_FILE to a file with the certificates of the authorities to trust, or correct the endpoint"
    ),
    BucketFault.UNREACHABLE: "check the endpoint and the network",
    BucketFault.OVERLOADED: "try again, or ask who runs the store",
    BucketFault.CHANGED: "try again",
    BucketFault.NO_CONDITIONAL_WRITES: "use a store or a version that has them (see docs/storage.md)",
    BucketFault.OTHER: "check the endpoint, the region and the store",
}


TEMPORARY = frozenset({BucketFault.UNREACHABLE, BucketFault.OVERLOADED, BucketFault.CHANGED})
"""Faults that may be gone in a later attempt."""


class BucketError(Exception):
    """A request to a bucket failed, after retries. The message has no credentials: it contains no text of the store's
    answer except a short error code."""

    def __init__(self, where: str, doing: str, fault: BucketFault, code: str) -> None:
        detail = f" ({code})" if code else ""
        super().__init__(f"{where}: {doing} failed: {fault.value}{detail}; {_ADVICE[fault]}")
        self.fault = fault
        self.code = code
        """Status and error code of the store, such as `403 AccessDenied`; empty if there was no answer."""
