"""A client of the S3 server in tests: credentials in the environment, and retries without long waits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from rljob_bucket import bucket
from rljob_testing.buckets.s3_server import CREDENTIALS


@contextmanager
def quick_client(seconds: float = 20, variables: Mapping[str, str] = CREDENTIALS) -> Iterator[None]:
    """Within the context, this process and its forks retry requests almost at once, and for at most `seconds`.
    `variables`: the only variables in the environment whose names begin with AWS_."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "FIRST_BACKOFF_SECONDS", 0.005)
        patch.setattr(bucket, "MAX_BACKOFF_SECONDS", 0.02)
        patch.setattr(bucket, "RETRY_SECONDS", seconds)
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        bucket.forget_stores()
        yield
    bucket.forget_stores()
