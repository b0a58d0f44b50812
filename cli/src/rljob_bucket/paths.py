"""Names of files and folders in a bucket."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rljob_api.scalars import BUCKET_KEY, BUCKET_NAME
from rljob_api.v1alpha1.checkpoint import S3Storage

S3 = "s3"


@dataclass(frozen=True)
class BucketPath:
    """A file or folder in a bucket. It contains no credentials, so it may be logged and sent to other processes.

    A bucket has no folders: a folder is a prefix of keys."""

    bucket: str
    key: str
    """Such as `team/run-1`, without `/` at its ends; empty for the whole bucket."""
    endpoint: str | None = None
    """URL of the store, such as `http://minio:9000`; None: AWS."""
    region: str | None = None

    def __truediv__(self, name: str) -> BucketPath:
        return replace(self, key=f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return self.as_uri()

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> BucketPath:
        """The folder of this path."""
        return replace(self, key=self.key.rpartition("/")[0])

    def as_uri(self) -> str:
        """Such as `s3://bucket/team/run-1`."""
        return f"{S3}://{self.bucket}/{self.key}".rstrip("/")

    def with_endpoint(self) -> str:
        """For messages: such as `s3://bucket/team/run-1 at http://minio:9000`."""
        return self.as_uri() if self.endpoint is None else f"{self.as_uri()} at {self.endpoint}"


DEFAULT_NAMESPACE = "default"
"""The namespace in the folder of a job that runs on this machine and whose file names no namespace."""


def job_folder(storage: S3Storage, namespace: str | None, job_name: str) -> BucketPath:
    """Returns the folder of a job in its bucket. Without a prefix it has the namespace in its name, because jobs of the
    same name in two namespaces may use one bucket."""
    folder = storage.prefix or f"{namespace or DEFAULT_NAMESPACE}/{job_name}"
    return BucketPath(storage.bucket, folder, storage.endpoint, storage.region)


def parsed_uri(uri: str) -> BucketPath | None:
    """Returns the path of a URI such as `s3://bucket/team/run-1`; None if it is not valid. Endpoint and region are
    those of the environment."""
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.rstrip("/").partition("/")
    is_valid = scheme == S3 and re.search(BUCKET_NAME, bucket) and re.search(BUCKET_KEY, key)
    return BucketPath(bucket, key) if is_valid else None
