"""`rljob get-results` and `rljob view` of a job whose results are in a bucket, against a real S3 server."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from rljob.cluster import Cluster
from rljob.errors import ResultsError
from rljob.job_attempts import storage_uri
from rljob.polling import Clock
from rljob.results.download import Downloaded
from rljob.results.results_copy import NoProgress, results_copy
from rljob.results.selection import DEFAULT_SELECTION, Selection, selection_of
from rljob.stored_job import StoredJob, stored_job
from rljob_bucket import bucket
from rljob_cli.cluster.view_bucket import view_bucket
from rljob_cli.errors import CliError
from rljob_cli.local.view import ViewOptions
from rljob_testing.buckets.clients import quick_client
from rljob_testing.buckets.fault_proxy import Fault, FaultProxy, Request, fault_proxy
from rljob_testing.buckets.s3_server import BUCKET, CREDENTIALS, S3Server, s3_server
from rljob_testing.cli import job_statuses
from rljob_testing.local_servers import free_port

NO_CLUSTER = cast(Cluster, SimpleNamespace())
"""A bucket is read without the cluster."""
MODEL = os.urandom(9 * 2**20)
FILES = {
    "checkpoints/starts/0001.json": b"{}",
    "checkpoints/step-00000001.start-0001/manifest.json": b"{}",
    "checkpoints/step-00000001.start-0001/rank-00000.safetensors": b"weights",
    "run/export/model.safetensors": MODEL,
    "run/logs/worker-0.log": b"log",
    "run/model-config/config.json": b"{}",
    "run/metrics.jsonl": b'{"step": 1, "wall_time": 1, "reward/mean": 0.5}\n',
    "run/rljob-run-state.json": b"",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("objects")) as server, quick_client():
        for name, content in FILES.items():
            bucket.write(server.path("team/small") / name, content)
        state = {
            "contractVersion": 1,
            "jobName": "small",
            "attempt": 1,
            "phase": "Complete",
            "progress": {"step": 1, "totalSteps": 1, "updatedAt": "2026-01-31T12:00:00Z"},
            "writtenAt": "2026-01-31T12:00:00Z",
        }
        bucket.write(server.path("team/small/run/rljob-run-state.json"), json.dumps(state).encode())
        yield server


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(server.port) as proxy:
        yield proxy


def job_at(endpoint: str, name: str = BUCKET) -> StoredJob:
    metadata = {"name": "small", "namespace": "team-a", "uid": "1", "creationTimestamp": "2026-01-31T12:00:00Z"}
    s3 = {"bucket": name, "prefix": "team/small", "endpoint": endpoint, "secret": "minio"}
    spec = {"checkpoint": {"storage": {"s3": s3}}}
    return stored_job({"metadata": metadata, "spec": spec, "status": job_statuses.RUNNING})


def copy(job: StoredJob, folder: Path, selection: Selection = DEFAULT_SELECTION) -> Downloaded:
    clock = Clock(sleep=lambda _: None)
    with results_copy(NO_CLUSTER, job, folder, selection, NoProgress(), None, clock) as prepared:
        return prepared.run()


def test_the_results_are_copied_and_what_is_there_is_not_copied_again(proxy: FaultProxy, tmp_path: Path) -> None:
    job = job_at(proxy.endpoint)
    assert storage_uri(job) == f"s3://{BUCKET}/team/small"
    first = copy(job, tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in first.written) == [
        "export/model.safetensors",
        "metrics.jsonl",
    ]
    assert (tmp_path / "export/model.safetensors").read_bytes() == MODEL
    again = copy(job, tmp_path)
    assert (again.written, again.num_unchanged, again.num_bytes) == ([], 2, 0)
    everything = copy(job, tmp_path, selection_of((), checkpoints=True, logs=True))
    assert len(everything.written) == 5
    # Runs that start from the copied checkpoints need it.
    assert (tmp_path / "model-config/config.json").is_file()
    assert (tmp_path / "checkpoints/step-00000001.start-0001/rank-00000.safetensors").read_bytes() == b"weights"


def test_lost_answers_do_not_matter_and_a_refusal_is_one_error(proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.choose = lambda request: Fault.CUT_ANSWER if request.number % 2 else None
    copy(job_at(proxy.endpoint), tmp_path)
    assert (tmp_path / "export/model.safetensors").read_bytes() == MODEL
    proxy.choose = lambda _: Fault.FORBIDDEN
    with pytest.raises(
        ResultsError, match=rf"the job's bucket: .* at {proxy.endpoint}: .*access is denied.*allow these"
    ):
        copy(job_at(proxy.endpoint), tmp_path / "other")
    proxy.reset()
    with pytest.raises(ResultsError, match="the bucket does not exist"):
        copy(job_at(proxy.endpoint, "no-such-bucket"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    server: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    path, newer = server.path("team/small/run/export/model.safetensors"), os.urandom(len(MODEL))
    reads: list[str] = []

    def replace_before_second(request: Request) -> None:
        if request.method == "GET" and path.name in request.target:
            reads.append(request.target)
            if len(reads) == 2:
                bucket.write(path, newer)

    proxy.choose = replace_before_second
    try:
        for name in ("results", "download"):
            reads.clear()
            if name == "results":
                copy(job_at(proxy.endpoint), tmp_path)
                found = tmp_path / "export/model.safetensors"
            else:
                found = tmp_path / "model"
                bucket.download(replace(path, endpoint=proxy.endpoint), found)
            # Half of the older and half of the newer file would be a model that nobody has trained.
            assert found.read_bytes() == newer
            assert len(reads) >= 4
            bucket.write(path, MODEL)
    finally:
        bucket.write(path, MODEL)


@pytest.mark.parametrize(
    "uri", ["s3://bucket/../x", "s3://Bucket/x", "s3://me:word@b/x", "s3://bucket/a b", "s3://bucket"]
)
def test_view_of_what_is_no_folder_of_a_job(uri: str) -> None:
    with pytest.raises(CliError, match="is not the folder of a job in a bucket"):
        view_bucket(uri, ViewOptions(Path()), Console(file=io.StringIO()))


def test_view_without_a_connection_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    endpoint = f"http://127.0.0.1:{free_port()}"
    with quick_client(0.2, {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}):
        clock, options = Clock(sleep=lambda _: None), ViewOptions(Path())
        with pytest.raises(ResultsError, match="the store does not respond"):
            view_bucket(f"s3://{BUCKET}/team/small", options, Console(file=io.StringIO()), clock)


def test_view_of_an_address_writes_the_page(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    page = tmp_path / "page.html"
    output = Console(file=io.StringIO(), width=200)
    with quick_client(variables={**CREDENTIALS, "AWS_ENDPOINT_URL": server.endpoint}):
        options = ViewOptions(Path(), output=page, watch=True)
        assert view_bucket(f"s3://{BUCKET}/team/small/", options, output) == 0
        assert "<html" in page.read_text()
        assert isinstance(output.file, io.StringIO)
        assert "The run has ended." in output.file.getvalue()
        with pytest.raises(ResultsError, match="has no files of a run"):
            view_bucket(f"s3://{BUCKET}/team/other", options, output)
    with pytest.raises(CliError, match="use s3://BUCKET/FOLDER"):
        view_bucket("s3://bucket", ViewOptions(Path()), output)


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rljob_bucket.bucket", None)
    monkeypatch.delattr("rljob_bucket.bucket")
    with pytest.raises(ResultsError, match=r"pip install 'rljob\[bucket\]'"):
        copy(job_at("http://127.0.0.1:1"), tmp_path)
