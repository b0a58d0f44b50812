"""A real S3 server: versitygw, which keeps objects as files in a folder."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import urllib3

from rljob_bucket.paths import BucketPath
from rljob_testing.cluster.go_programs import ensure_program
from rljob_testing.local_servers import free_port
from rljob_testing.settings import inherited_environment

ACCESS_KEY, SECRET_KEY = "access-key-of-the-test", "secret-key-of-the-test"
CREDENTIALS: Mapping[str, str] = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
"""Environment variables of a client that has exactly the permissions of docs/storage.md."""
READER_KEY = "access-key-that-may-only-read"
READER_CREDENTIALS = {**CREDENTIALS, "AWS_ACCESS_KEY_ID": READER_KEY}
"""Environment variables of a client that may only list and read."""
BUCKET = "checkpoints-of-tests"
_READ = ["s3:GetObject"]
_WRITE = ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]


@dataclass(frozen=True)
class S3Server:
    """A running server."""

    port: int
    folder: Path
    """The objects, as files: `<bucket>/<key>`."""

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def path(self, key: str, endpoint: str | None = None) -> BucketPath:
        """A path in the test's bucket; `endpoint`: that of a proxy."""
        return BucketPath(BUCKET, key, endpoint or self.endpoint)

    def keys(self, key: str) -> list[str]:
        """The keys of all objects below a folder, relative to it, without asking the server."""
        folder = self.folder / BUCKET / key
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Runs a server with the bucket BUCKET within the context. `folder` must be empty; extended attributes must work
    there."""
    objects, accounts = folder / "objects", folder / "accounts"
    (objects / BUCKET).mkdir(parents=True)
    accounts.mkdir()
    users = {key: {"access": key, "secret": SECRET_KEY, "role": "user"} for key in (ACCESS_KEY, READER_KEY)}
    (accounts / "users.json").write_text(json.dumps({"accessAccounts": users}))
    # The server stores the policy of a bucket in this extended attribute.
    os.setxattr(objects / BUCKET, "user.policy", json.dumps(_policy()).encode())
    server = S3Server(free_port(), objects)
    variables = {"ROOT_ACCESS_KEY": "root", "ROOT_SECRET_KEY": "secret-key-of-root"}
    options = ["--port", f"127.0.0.1:{server.port}", "--quiet", "--iam-dir", str(accounts)]
    command = [str(ensure_program("versitygw")), *options, "posix", str(objects)]
    process = subprocess.Popen(
        command, env=inherited_environment() | variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        # Any answer means that the server is ready.
        urllib3.PoolManager().request(
            "GET", server.endpoint, retries=urllib3.Retry(100, backoff_factor=0.02, backoff_max=0.1)
        )
        yield server
    finally:
        process.kill()
        process.wait()


def _policy() -> dict[str, object]:
    """The permissions of docs/storage.md, in the form of a policy of the bucket."""

    def allow(users: list[str], actions: list[str], resource: str) -> dict[str, object]:
        return {
            "Effect": "Allow",
            "Principal": {"AWS": users},
            "Action": actions,
            "Resource": f"arn:aws:s3:::{resource}",
        }

    both = [ACCESS_KEY, READER_KEY]
    return {
        "Version": "2012-10-17",
        "Statement": [
            allow(both, ["s3:ListBucket"], BUCKET),
            allow(both, _READ, f"{BUCKET}/*"),
            allow([ACCESS_KEY], _WRITE, f"{BUCKET}/*"),
        ],
    }
