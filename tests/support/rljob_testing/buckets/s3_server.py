"""A real S3 server: versitygw, which keeps objects as files in a folder."""

from __future__ import annotations

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
"""Environment variables of a client."""
BUCKET = "checkpoints-of-tests"


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
def s3_server(folder: Path, *, is_read_only: bool = False) -> Iterator[S3Server]:
    """Runs a server with the bucket BUCKET within the context. `folder` must be empty, or that of another server;
    extended attributes must work there. `is_read_only`: every request that changes something is refused."""
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    server = S3Server(free_port(), folder)
    variables = {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    program = str(ensure_program("versitygw"))
    options = ["--port", f"127.0.0.1:{server.port}", "--quiet", *(["--readonly"] if is_read_only else [])]
    command = [program, *options, "posix", str(folder)]
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
