"""A bucket that cannot be used ends a start with one error, before torch is loaded and before a device is used. The
error names the field, the bucket, the endpoint and what to do, and contains no credentials."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rljob_api.contract_documents import TrainerJob, dump_job
from rljob_api.v1alpha1.job import RLJob
from rljob_testing.buckets.clients import quick_client
from rljob_testing.buckets.fault_proxy import Fault, FaultProxy
from rljob_testing.buckets.s3_server import ACCESS_KEY, BUCKET, CREDENTIALS, READER_CREDENTIALS, SECRET_KEY, S3Server
from rljob_testing.certificates import self_signed_certificate
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.local_servers import free_port, running_http_server
from rljob_testing.settings import inherited_environment
from rljob_trainer.checkpoints.bucket_run_folder import BucketRunFolder
from rljob_trainer.errors import ConfigurationError, ResourceError, TrainerError
from rljob_trainer.settings import Settings, read_settings

WRONG = "wrong-value-of-the-test"


def job_in(endpoint: str, bucket: str = BUCKET) -> TrainerJob:
    s3 = {"bucket": bucket, "prefix": "team/run-1", "endpoint": endpoint}
    spec = RLJob.model_validate(valid_job({"spec.checkpoint.storage": {"s3": s3}})).spec
    return TrainerJob(name="job", spec=spec)


def settings_of(folder: Path, job: TrainerJob, patch: pytest.MonkeyPatch) -> Settings:
    patch.setenv("RLJOB_SPEC", dump_job(job))
    patch.setenv("RLJOB_RUN_FOLDER", str(folder))
    return read_settings()


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    return Refused(tmp_path, monkeypatch)


class Refused:
    """The error of a start, without the credentials of the client in it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, patch

    def __call__(self, job: TrainerJob, expected: type[TrainerError]) -> str:
        with pytest.raises(expected) as caught:
            BucketRunFolder().prepare(job, settings_of(self._folder, job, self._patch))
        message = str(caught.value)
        assert not [secret for secret in (ACCESS_KEY, SECRET_KEY, WRONG) if secret in message]
        assert "\n" not in message
        # The name of the small file that is written first.
        return re.sub("/probe-[0-9a-f]{16}", "", message)


def test_a_missing_bucket(server: S3Server, refused: Refused) -> None:
    assert refused(job_in(server.endpoint, "no-such-bucket"), ConfigurationError) == (
        f"spec.checkpoint.storage.s3.bucket: s3://no-such-bucket/team/run-1 at {server.endpoint}: creating failed: the"
        " bucket does not exist (404 NoSuchBucket); create the bucket, or correct its name, the endpoint or the region"
    )


def test_a_bucket_that_may_only_be_read(server: S3Server, refused: Refused) -> None:
    with quick_client(variables=READER_CREDENTIALS):
        message = refused(job_in(server.endpoint), ConfigurationError)
    assert message == (
        f"spec.checkpoint.storage.s3: s3://{BUCKET}/team/run-1 at {server.endpoint}: creating failed: access is"
        " denied (403 AccessDenied); allow these credentials to list, read, write and delete objects of the bucket"
    )


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials(server: S3Server, refused: Refused, wrong: str) -> None:
    with quick_client(variables={**CREDENTIALS, wrong: WRONG}):
        message = refused(job_in(server.endpoint), ConfigurationError)
    assert message.startswith(
        f"spec.checkpoint.storage.s3.secret: s3://{BUCKET}/team/run-1 at {server.endpoint}: creating failed: the"
        " credentials are missing or wrong ("
    )
    assert "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in message


@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.INTERNAL_ERROR])
def test_a_store_that_fails_for_a_while_is_an_infrastructure_failure(
    proxy: FaultProxy, refused: Refused, fault: Fault
) -> None:
    proxy.choose = lambda _: fault
    with quick_client(seconds=0.2):
        message = refused(job_in(proxy.endpoint), ResourceError)
    assert "the store is failing or limiting requests at the moment (50" in message


def test_a_closed_endpoint_is_not_the_users_mistake_for_certain(refused: Refused) -> None:
    """So it is an infrastructure failure, which the operator repeats."""
    endpoint = f"http://127.0.0.1:{free_port()}"
    with quick_client(seconds=0.2):
        message = refused(job_in(endpoint), ResourceError)
    assert message == (
        f"spec.checkpoint.storage.s3.endpoint: s3://{BUCKET}/team/run-1 at {endpoint}: creating failed: the store does"
        " not respond; check the endpoint and the network"
    )


class NotAStore(BaseHTTPRequestHandler):
    """A web server that knows no path."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(404)

    def log_message(self, format: str, *_: object) -> None:
        """Prints nothing."""


def test_an_endpoint_that_is_not_a_store(refused: Refused) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), NotAStore)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    with running_http_server(server):
        message = refused(job_in(endpoint), ConfigurationError)
    assert message == (
        f"spec.checkpoint.storage.s3: s3://{BUCKET}/team/run-1 at {endpoint}: creating failed: the store returned"
        " an error (404); check the endpoint, the region and the store"
    )


def test_a_certificate_that_is_not_trusted(tmp_path: Path, refused: Refused) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), NotAStore)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(self_signed_certificate(tmp_path / "store.pem", "127.0.0.1"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    endpoint = f"https://127.0.0.1:{server.server_port}"
    with running_http_server(server), quick_client(seconds=0.2):
        message = refused(job_in(endpoint), ConfigurationError)
    assert message == (
        f"spec.checkpoint.storage.s3.endpoint: s3://{BUCKET}/team/run-1 at {endpoint}: creating failed: the certificate"
        " of the store is not trusted; set SSL_CERT_FILE to a file with the certificates of the authorities to trust,"
        " or correct the endpoint"
    )


def test_the_program_ends_with_the_error_before_it_loads_torch(server: S3Server, tmp_path: Path) -> None:
    program = """
import sys
from rljob_trainer.__main__ import main
code = main()
assert "torch" not in sys.modules
assert "ray" not in sys.modules
sys.exit(code)
"""
    environment = inherited_environment() | {
        "RLJOB_SPEC": dump_job(job_in(server.endpoint, "no-such-bucket")),
        "RLJOB_RUN_FOLDER": str(tmp_path / "run"),
        **CREDENTIALS,
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert "spec.checkpoint.storage.s3.bucket: s3://no-such-bucket/team/run-1" in line
