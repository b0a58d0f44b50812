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
    OVERLOADED = "the store is failing or limiting requests at the moment"
    CHANGED = "the file was replaced while it was read"
    NO_CONDITIONAL_WRITES = (
        "the store has replaced a file that existed, so it does not support conditional writes (If-None-Match)"
    )
    OTHER = "the store returned an error"


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
    BucketFault.OVERLOADED: "try again later, or ask the administrator of the store",
    BucketFault.CHANGED: "try again",
    BucketFault.NO_CONDITIONAL_WRITES: "use a store, or a version of it, that supports them (see docs/storage.md)",
    BucketFault.OTHER: "check the endpoint, the region and the store",
}


TEMPORARY = frozenset({BucketFault.UNREACHABLE, BucketFault.OVERLOADED, BucketFault.CHANGED})
"""Faults that a later attempt may not have."""


class BucketError(Exception):
    """A request to a bucket failed, after retries. The message has no credentials: it contains no text of the store's
    answer except a short error code."""

    def __init__(self, where: str, doing: str, fault: BucketFault, code: str) -> None:
        detail = f" ({code})" if code else ""
        super().__init__(f"{where}: {doing} failed: {fault.value}{detail}; {_ADVICE[fault]}")
        self.fault = fault
        self.code = code
        """Status and error code of the store, such as `403 AccessDenied`; empty if there was no answer."""
