"""Preparing and cleaning up a copy of results: the lock of its folder, and the creation and deletion of its pod. The
copy itself and the API server are stand-ins."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from rljob.cluster import Cluster
from rljob.errors import ClusterUnreachableError, JobNotFoundError, ObjectNotFoundError, RejectedError, ResultsError
from rljob.kubernetes_models import Json
from rljob.polling import Clock
from rljob.results import results_copy as module
from rljob.results.download import Downloaded
from rljob.results.pod import ResultsPod, manifest, pod_user
from rljob.results.pod_start import wait_until_running
from rljob.results.results_copy import NoProgress, ResultsCopy, results_copy
from rljob.results.selection import DEFAULT_SELECTION, selection_of
from rljob.results.volume import Placement
from rljob.stored_job import StoredJob, stored_job
from rljob_api.constants import ExitCode
from rljob_cli.cluster import results
from rljob_testing.cli import job_statuses
from rljob_testing.cli.job_results import PODS, SteppedClock

CLUSTER = cast(Cluster, SimpleNamespace())
CREATED = "2026-01-31T12:00:00Z"


RUNNING = job_statuses.RUNNING | {"pods": PODS}


def job(uid: str, status: Json | None = None, spec: Json | None = None) -> StoredJob:
    metadata = {"name": "small", "namespace": "team-a", "uid": uid, "creationTimestamp": CREATED}
    storage = {"checkpoint": {"storage": {"persistentVolumeClaim": "data"}}}
    return stored_job({"metadata": metadata, "spec": storage | (spec or {}), "status": status or {}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "copy"


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pod, and a copy of one file."""
    monkeypatch.setattr(module, "ResultsPod", lambda *_: nullcontext(SimpleNamespace(connect=None)))
    monkeypatch.setattr(
        module, "Download", lambda *given: SimpleNamespace(run=lambda: write(given[2]), close=lambda: None)
    )


def write(folder: Path) -> Downloaded:
    (folder / "metrics.jsonl").touch()
    return Downloaded(written=[folder / "metrics.jsonl"])


def copy(uid: str, folder: Path, sleep: Callable[[float], None] = lambda _: None) -> Downloaded:
    with results_copy(CLUSTER, job(uid), folder, DEFAULT_SELECTION, NoProgress(), None, Clock(sleep=sleep)) as copy:
        return copy.run()


def test_a_copy_belongs_to_one_job_also_if_another_has_its_name(folder: Path) -> None:
    copy("first", folder)
    copy("first", folder)
    with pytest.raises(ResultsError, match="RLJob team-a/small, such as those of an earlier job of this name"):
        copy("second", folder)


def test_a_second_process_waits_until_the_first_copy_is_complete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second copy begins while the first one is under way, and goes on after it."""
    order: list[str] = []

    class Waits(Exception):
        pass

    def wait(_: float) -> None:
        order.append("second waits")
        raise Waits

    def run() -> Downloaded:
        with pytest.raises(Waits):
            copy("uid", folder, wait)
        order.append("first is complete")
        return write(folder)

    with monkeypatch.context() as patched:
        patched.setattr(module, "Download", lambda *_: SimpleNamespace(run=run, close=lambda: None))
        copy("uid", folder)
    assert order == ["second waits", "first is complete"]
    copy("uid", folder, wait)


def test_a_copy_of_nothing_leaves_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Download", lambda *_: SimpleNamespace(run=Downloaded, close=lambda: None))
    with pytest.raises(ResultsError, match="has none of these files yet"):
        copy("uid", folder)
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match="file/copy: cannot be written \\(Not a directory\\); choose another folder"):
        copy("uid", tmp_path / "file" / "copy")


class ApiServer:
    """Answers requests, and raises the errors of `failures` first."""

    def __init__(self, failures: dict[str, list[BaseException]], jobs: list[StoredJob] | None = None) -> None:
        self.failures = failures
        self.jobs = jobs or []
        self.requests: list[str] = []

    def request(self, method: str, *_: object, **__: object) -> dict[str, object]:
        self.requests.append(method)
        if self.failures.get(method):
            raise self.failures[method].pop(0)
        return {"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}

    def job(self, _: str) -> StoredJob:
        return self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0]


def test_a_pod_whose_creation_was_interrupted_is_deleted_also_if_it_is_created_later() -> None:
    server = ApiServer({"POST": [KeyboardInterrupt()], "DELETE": [ObjectNotFoundError("not yet")]})
    slept: list[float] = []
    pod = ResultsPod(cast(Cluster, server), job("uid", RUNNING), lambda _: None, None, Clock(sleep=slept.append))
    with pytest.raises(KeyboardInterrupt), pod:
        pod.connect()
    assert [method for method in server.requests if method != "GET"] == ["POST", "DELETE", "DELETE"]
    assert slept == [1.0]


def test_a_pod_that_cannot_be_deleted_does_not_hide_the_error() -> None:
    server = ApiServer({"POST": [KeyboardInterrupt()], "DELETE": [RejectedError("HTTP 422")]})
    notes: list[str] = []
    pod = ResultsPod(cast(Cluster, server), job("uid", RUNNING), notes.append, None, Clock(sleep=lambda _: None))
    with pytest.raises(KeyboardInterrupt), pod:
        pod.connect()
    (note,) = notes
    assert "could not be deleted (HTTP 422)" in note


@pytest.mark.parametrize(("until", "seconds"), [(550, 590), (10_000, 601)])
def test_an_outage_of_ten_minutes_does_not_end_the_start_of_the_pod(until: int, seconds: int) -> None:
    """The pull of the image would begin again with another pod. `seconds`: how long the command waits."""
    clock = SteppedClock()

    class Outage:
        def request(self, _: str, path: str, *__: object) -> Json:
            if 0 < clock.seconds < until:
                raise ClusterUnreachableError("kind", "timed out")
            pulling = {"metadata": {"name": "e", "creationTimestamp": CREATED}, "reason": "Pulling"}
            phase = "Pending" if clock.seconds < 590 else "Running"
            pod: Json = {"metadata": {"name": "p", "creationTimestamp": CREATED}, "status": {"phase": phase}}
            return {"items": [pulling]} if path.endswith("/events") else pod

    is_short = until < 600
    with nullcontext() if is_short else pytest.raises(ClusterUnreachableError):
        wait_until_running(cast(Cluster, Outage()), job("uid"), "p", lambda _: None, Clock(clock.now, clock.sleep))
    assert clock.seconds == seconds


def test_the_pod_has_the_service_account_of_the_job_without_its_token() -> None:
    stored = job("uid", RUNNING, {"serviceAccountName": "puller"})
    made = manifest(stored, "x", pod_user(stored), Placement())
    spec = cast(dict[str, object], made["spec"])
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("puller", False)
    stored = job("uid", RUNNING)
    assert "serviceAccountName" not in cast(
        dict[str, object], manifest(stored, "x", pod_user(stored), Placement())["spec"]
    )


QUEUED = RUNNING | {"attempts": [job_statuses.ATTEMPT | {"number": 2, "state": "Queued"}]}
BETWEEN = RUNNING | {"attempts": [job_statuses.ENDED], "nextAttempt": job_statuses.BETWEEN}


def test_while_no_trainer_runs_a_watched_job_has_no_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the volume of the next attempt could be kept on another node."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done: list[str] = []
    downloaded = Downloaded(problems=["run/samples.jsonl: Input/output error"])
    copies = ResultsCopy(lambda: done.append("copy") or downloaded, lambda: done.append("release"))  # type: ignore[func-returns-value]
    monkeypatch.setattr(results, "results_copy", lambda *_: nullcontext(copies))
    monkeypatch.setattr(results, "write_run_state", lambda job, _: done.append(job.phase))
    states = [RUNNING, BETWEEN, QUEUED, RUNNING, RUNNING | {"phase": "Complete", "result": job_statuses.COMPLETE}]
    phases = [{"phase": name} for name in ("Running", "Retrying", "Queued", "Running", "Complete")]
    server = ApiServer({}, [job("uid", state | phase) for state, phase in zip(states, phases, strict=True)])
    console = Console(file=io.StringIO(), width=200)
    with results.viewed_job(cast(Cluster, server), server.jobs[0], None, console, Clock()) as viewed:
        goes_on = [viewed.refresh() for _ in range(5)]
        server.jobs = [job("another")]
        with pytest.raises(JobNotFoundError, match="was deleted"):
            viewed.refresh()
    assert goes_on == [True, True, True, True, False]
    assert done == [
        *("copy", "Running", "copy", "release", "Retrying", "release", "Queued", "copy", "Running"),
        *("copy", "Complete"),
    ]
    output = console.file
    assert isinstance(output, io.StringIO)
    assert output.getvalue() == "not copied: run/samples.jsonl: Input/output error\n"


def test_the_run_state_is_written_with_any_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, `rljob view` of the copy could not say how the run ended."""
    written: list[Path] = []
    copies = ResultsCopy(Downloaded, lambda: None)
    monkeypatch.setattr(results, "results_copy", lambda *_: nullcontext(copies))
    monkeypatch.setattr(results, "write_run_state", lambda _, folder: written.append(folder))
    server = ApiServer({}, [job("uid", RUNNING)])
    options = results.ResultsOptions(tmp_path, selection_of(["metrics"]))
    assert results.get_results(cast(Cluster, server), "small", options, Console(file=io.StringIO()), Clock()) == 0
    assert written == [tmp_path]


def test_an_outage_of_ten_minutes_does_not_end_a_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(results, "write_run_state", lambda *_: None)
    outage = ResultsError("the connection to the pod broke 9 times in a row", ExitCode.INFRASTRUCTURE)
    outcomes: list[Downloaded | ResultsError] = []

    def run() -> Downloaded:
        outcome = outcomes.pop(0)
        if isinstance(outcome, ResultsError):
            raise outcome
        return outcome

    monkeypatch.setattr(results, "results_copy", lambda *_: nullcontext(ResultsCopy(run, lambda: None)))
    complete = job("uid", RUNNING | {"phase": "Complete", "result": job_statuses.COMPLETE})
    server = ApiServer({}, [job("uid", RUNNING)])
    clock = SteppedClock()
    given = cast(Cluster, server), server.jobs[0], None, Console(file=io.StringIO()), Clock(clock.now, clock.sleep)
    with results.viewed_job(*given) as viewed:
        outcomes = [outage]
        with pytest.raises(ResultsError):
            viewed.refresh()
        outcomes = [Downloaded(), outage]
        assert viewed.refresh()
        server.jobs = [complete]
        clock.sleep(600)
        assert viewed.refresh(), "the newest files are not there yet"
        outcomes = [Downloaded()]
        assert not viewed.refresh()
        # Nothing is copied while the job waits.
        clock.sleep(3600)
        server.jobs = [job("uid", RUNNING)]
        outcomes = [outage, outage]
        assert viewed.refresh()
        clock.sleep(601)
        with pytest.raises(ResultsError):
            viewed.refresh()


def test_copies_for_pages_that_nobody_uses_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(results, "results_copy", lambda *_: nullcontext(None))
    for name, days in (("old-12345678", 8), ("new-12345678", 6)):
        folder = tmp_path / "rljob" / "view" / "team-a" / name
        folder.mkdir(parents=True)
        (folder / ".rljob-results.json").touch()
        used = time.time() - days * 24 * 3600
        os.utime(folder / ".rljob-results.json", (used, used))
    with results.viewed_job(CLUSTER, job("uid"), None, Console(), Clock()):
        pass
    assert [folder.name for folder in (tmp_path / "rljob/view/team-a").iterdir()] == ["new-12345678"]
