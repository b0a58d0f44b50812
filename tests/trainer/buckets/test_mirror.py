"""The copies of a run folder in a bucket: what is uploaded when, and what a start on another machine gets back."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from rljob_api.contract_documents import TrainerJob, dump_job
from rljob_api.v1alpha1.job import RLJob
from rljob_bucket.paths import BucketPath
from rljob_testing.buckets.fault_proxy import Fault, FaultProxy
from rljob_testing.buckets.s3_server import BUCKET, S3Server
from rljob_testing.jobs.valid_job import valid_job
from rljob_trainer.checkpoints.bucket_run_folder import BucketRunFolder
from rljob_trainer.checkpoints.fencing import announce_start
from rljob_trainer.checkpoints.storage import CHECKPOINTS
from rljob_trainer.observability.bucket_mirror import BYTES_PER_SECOND, BucketMirror
from rljob_trainer.settings import Settings, read_settings


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def target(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> BucketPath:
    return server.path(f"{tmp_path.name}/run", proxy.endpoint)


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def puts(proxy: FaultProxy) -> list[str]:
    """The files that were uploaded since the last call."""
    found = [request.target.partition("/run/")[2] for request in proxy.requests if request.method == "PUT"]
    proxy.reset()
    return sorted(found)


def test_only_changed_files_are_uploaded(
    server: S3Server, proxy: FaultProxy, target: BucketPath, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for name in (
        "metrics.jsonl",
        "logs/worker-0.log",
        "checkpoints/step/a",
        "export/b",
        "export-best/b",
        ".lock",
        "resolved.tmp",
        "tokens/step-1.unfinished",
        "profiles/unfinished-1.nsys-rep",
    ):
        write(folder, name, "1")
    write(tmp_path, "state.json", "{}")
    mirror = BucketMirror(folder, target, lambda: True, Clock(), {"rljob-run-state.json": tmp_path / "state.json"})
    mirror.upload_now()
    assert puts(proxy) == ["logs/worker-0.log", "metrics.jsonl", "rljob-run-state.json"]
    mirror.upload_now()
    assert puts(proxy) == []
    write(folder, "metrics.jsonl", "12")
    (folder / "logs" / "worker-0.log").unlink()
    mirror.upload_now()
    assert puts(proxy) == ["metrics.jsonl"]
    assert (server.folder / BUCKET / target.key / "metrics.jsonl").read_text() == "12"
    # Files that were removed here, for example by retention, are removed there.
    assert not (server.folder / BUCKET / target.key / "logs").exists()
    mirror.close()
    assert puts(proxy) == []


def test_a_file_that_grows_costs_a_bounded_number_of_bytes(
    proxy: FaultProxy, target: BucketPath, tmp_path: Path
) -> None:
    clock = Clock()
    mirror = BucketMirror(tmp_path, target, lambda: True, clock)
    size = 2 * BYTES_PER_SECOND
    (tmp_path / "samples.jsonl").touch()
    os.truncate(tmp_path / "samples.jsonl", size)
    mirror.upload_due()
    assert puts(proxy) == ["samples.jsonl"]
    for seconds, expected in ((1.9, []), (0.2, ["samples.jsonl"])):
        size += 1
        os.truncate(tmp_path / "samples.jsonl", size)
        clock.now += seconds
        mirror.upload_due()
        assert puts(proxy) == expected


def test_a_failure_is_logged_and_the_next_pass_repeats_it(
    proxy: FaultProxy, target: BucketPath, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "metrics.jsonl", "1")
    mirror = BucketMirror(tmp_path, target, lambda: True, Clock())
    proxy.choose = lambda request: Fault.FORBIDDEN if request.method == "PUT" else None
    with caplog.at_level(logging.WARNING):
        mirror.upload_now()
    assert "not copied to the bucket at the moment" in caplog.text
    puts(proxy)
    mirror.upload_now()
    assert puts(proxy) == ["metrics.jsonl"]


def test_a_file_that_is_removed_during_a_pass_does_not_end_the_pass(
    proxy: FaultProxy, target: BucketPath, tmp_path: Path
) -> None:
    names = [f"{number}.log" for number in range(20)]
    for name in names:
        write(tmp_path, name, "1")

    def remove_one() -> bool:
        (tmp_path / names[-1]).unlink(missing_ok=True)
        return True

    asked = iter([lambda: True])
    mirror = BucketMirror(tmp_path, target, lambda: next(asked, remove_one)(), Clock())
    mirror.upload_now()
    assert puts(proxy) == sorted(names[:-1])


def test_an_earlier_start_makes_no_more_copies(proxy: FaultProxy, target: BucketPath, tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", "1")
    write(tmp_path, "samples.jsonl", "1")
    may_write = [True, True, False, False]
    """Before the pass, and before each file; a later start takes over within a pass."""
    mirror = BucketMirror(tmp_path, target, lambda: may_write.pop(0), Clock())
    mirror.upload_now()
    assert len(puts(proxy)) == 1
    mirror.upload_now()
    assert puts(proxy) == []
    assert may_write == []


def job_in(endpoint: str, prefix: str) -> TrainerJob:
    s3 = {"bucket": BUCKET, "prefix": prefix, "endpoint": endpoint}
    spec = RLJob.model_validate(valid_job({"spec.checkpoint.storage": {"s3": s3}})).spec
    return TrainerJob(name="job", spec=spec)


def settings_of(folder: Path, job: TrainerJob, start_number: int, patch: pytest.MonkeyPatch) -> Settings:
    patch.setenv("RLJOB_SPEC", dump_job(job))
    patch.setenv("RLJOB_RUN_FOLDER", str(folder))
    patch.setenv("RLJOB_START_NUMBER", str(start_number))
    return read_settings()


def test_a_start_on_another_machine_gets_the_files_back(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(proxy.endpoint, f"team/{tmp_path.name}")
    root = server.path(f"team/{tmp_path.name}/{CHECKPOINTS}")
    first = settings_of(tmp_path / "first", job, 100, monkeypatch)
    write(first.run_folder, "metrics.jsonl", json.dumps({"step": 1}) + "\n")
    write(first.run_folder, "attempts.jsonl", "{}\n")
    copy = BucketRunFolder()
    copy.prepare(job, first)
    announce_start(root, 100)
    copy.begin(first)
    copy.end()
    second = settings_of(tmp_path / "second", job, 200, monkeypatch)
    other = BucketRunFolder()
    other.prepare(job, second)
    # The first start copies until a later one is announced, so the files are downloaded afterwards.
    write(first.run_folder, "metrics.jsonl", json.dumps({"step": 2}) + "\n")
    copy.copy_now()
    announce_start(root, 200)
    other.begin(second)
    assert (second.run_folder / "metrics.jsonl").read_text() == '{"step": 2}\n'
    assert not (second.run_folder / "attempts.jsonl").exists()
    # The first start goes on, although a later one has begun.
    write(first.run_folder, "metrics.jsonl", "late\n")
    copy.copy_now()
    assert (server.folder / BUCKET / f"team/{tmp_path.name}/run/metrics.jsonl").read_text() == '{"step": 2}\n'
    other.end()
    # On the same machine the files of the run folder are the newest ones.
    write(second.run_folder, "metrics.jsonl", "newest\n")
    third = settings_of(tmp_path / "second", job, 300, monkeypatch)
    last = BucketRunFolder()
    last.prepare(job, third)
    announce_start(root, 300)
    last.begin(third)
    last.end()
    assert (third.run_folder / "metrics.jsonl").read_text() == "newest\n"


def test_a_start_by_hand_is_later_than_all_others(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(proxy.endpoint, f"team/{tmp_path.name}")
    root = server.path(f"team/{tmp_path.name}/{CHECKPOINTS}")
    of_operator = settings_of(tmp_path / "run", job, 1_700_000_002, monkeypatch)
    monkeypatch.delenv("RLJOB_START_NUMBER")
    by_hand = read_settings()
    assert BucketRunFolder().prepare(job, by_hand).start_number == 1
    announce_start(root, 1_700_000_002)
    assert BucketRunFolder().prepare(job, by_hand).start_number == 1_700_000_003
    # An old start of the operator stays old.
    assert BucketRunFolder().prepare(job, of_operator).start_number == 1_700_000_002
