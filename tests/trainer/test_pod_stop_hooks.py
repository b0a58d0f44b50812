"""The stop hooks of head and worker pods: they wait for the trainer only, and for a bounded time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from rljob_testing.local_servers import QuietHandler
from rljob_trainer.pod import stop_driver
from rljob_trainer.pod import wait_for_worker_exit as hook
from rljob_trainer.pod.ray_jobs import RayJobs, RayJobsError
from rljob_trainer.pod.stop_driver import stop_jobs
from rljob_trainer.pod.wait_for_worker_exit import wait_for_worker_exit, worker_processes

TOKEN = "right"


@dataclass
class Clock:
    """Replaces the module `time`: sleeping takes no time, and events that are due by then happen."""

    seconds: float = 0.0
    due: list[tuple[float, Callable[[], object]]] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        for each in [each for each in self.due if each[0] <= self.seconds]:
            self.due.remove(each)
            each[1]()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (stop_driver, hook):
        monkeypatch.setattr(module, "time", clock)
    return clock


class StandInDashboard(ThreadingHTTPServer):
    """Ray's Jobs API, with jobs whose state the test decides. `polls_until_stopped` counts requests for the list
    between a job's stop and its end."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.states: dict[str, str] = {}
        self.polls_until_stopped = 2
        self.stops: list[str] = []
        self.num_refusals = 0
        """How many stops are answered with false, as while a job has no process yet."""
        self.num_failures = 0
        """How many requests are answered with status 500."""

    def answer(self, method: str, path: str) -> tuple[int, object]:
        if self.num_failures > 0:
            self.num_failures -= 1
            return 500, "no available agent"
        if (method, path) == ("GET", "/api/jobs/"):
            if self.stops:
                self.polls_until_stopped -= 1
            if self.polls_until_stopped <= 0:
                self.states.update(dict.fromkeys(self.stops, "STOPPED"))
            drivers: list[object] = [{"type": "DRIVER", "submission_id": None, "status": "RUNNING"}]
            return 200, drivers + [{"submission_id": name, "status": state} for name, state in self.states.items()]
        name = path.removeprefix("/api/jobs/").removesuffix("/stop")
        if method == "POST" and name in self.states:
            if self.num_refusals > 0:
                self.num_refusals -= 1
                return 200, {"stopped": False}
            self.stops.append(name)
            return 200, {"stopped": True}
        return 404, "no such path"


class _Handler(QuietHandler):
    server: StandInDashboard

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        status, body = 403, "wrong token" if "Authorization" in self.headers else "no token"
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            status, document = self.server.answer(self.command, self.path)
            body = json.dumps(document)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())


@pytest.fixture
def dashboard() -> Iterator[StandInDashboard]:
    with StandInDashboard() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def jobs_of(dashboard: StandInDashboard, token: str | None = TOKEN) -> RayJobs:
    return RayJobs(dashboard.server_address[1], token)


def test_a_running_job_is_stopped_once_and_waited_for(dashboard: StandInDashboard) -> None:
    dashboard.states = {"a-1-1": "FAILED", "a-1-2": "RUNNING"}
    assert stop_jobs(jobs_of(dashboard), 30)
    assert dashboard.stops == ["a-1-2"]
    assert dashboard.states == {"a-1-1": "FAILED", "a-1-2": "STOPPED"}


def test_without_a_running_job_the_hook_returns_at_once(dashboard: StandInDashboard, clock: Clock) -> None:
    dashboard.states = {"a-1-1": "SUCCEEDED", "a-1-2": "STOPPED", "a-1-3": "FAILED"}
    assert stop_jobs(jobs_of(dashboard), 30)
    assert clock.seconds == 0
    assert dashboard.stops == []


def test_a_stop_without_effect_is_requested_again(dashboard: StandInDashboard) -> None:
    dashboard.states, dashboard.num_refusals = {"a-1-1": "PENDING"}, 1
    assert stop_jobs(jobs_of(dashboard), 30)
    assert dashboard.stops == ["a-1-1"]


def test_errors_are_retried(dashboard: StandInDashboard, capsys: pytest.CaptureFixture[str]) -> None:
    dashboard.states, dashboard.num_failures = {"a-1-1": "RUNNING"}, 2
    assert stop_jobs(jobs_of(dashboard), 30)
    assert dashboard.stops == ["a-1-1"]
    assert capsys.readouterr().err.count("returned 500") == 2


def test_the_hook_is_bounded_in_time(dashboard: StandInDashboard, clock: Clock) -> None:
    dashboard.states, dashboard.polls_until_stopped = {"a-1-1": "RUNNING"}, 1000
    assert not stop_jobs(jobs_of(dashboard), 30)
    assert 29 < clock.seconds <= 30
    assert dashboard.stops == ["a-1-1"]


@pytest.mark.parametrize(("token", "message"), [(None, "no token"), ("wrong", "wrong token")])
def test_a_rejected_token_is_logged(dashboard: StandInDashboard, token: str | None, message: str) -> None:
    with pytest.raises(RayJobsError, match=rf"GET /api/jobs/ returned 403 \({message}\)"):
        jobs_of(dashboard, token).unfinished()


def test_a_deleted_head_is_not_waited_for(clock: Clock) -> None:
    assert not stop_jobs(RayJobs(1, TOKEN), 30)
    assert clock.seconds == 0


def process(folder: Path, number: int, *command: str) -> None:
    (folder / str(number)).mkdir(parents=True)
    (folder / str(number) / "cmdline").write_bytes("\0".join(command).encode() + b"\0")


def test_only_the_trainers_workers_are_waited_for(tmp_path: Path) -> None:
    # Ray writes a title over the command line.
    process(tmp_path, 17, "ray::RayWorker.actor.update_policy")
    process(tmp_path, 8, "ray::RayWorker")
    process(tmp_path, 9, "ray::IDLE")
    process(tmp_path, 10, "python", "-m", "ray::RayWorker")
    process(tmp_path, 11)
    (tmp_path / "12").mkdir()
    (tmp_path / "self").mkdir()
    assert worker_processes(tmp_path) == [8, 17]


def test_a_pod_without_workers_stops_at_once(tmp_path: Path, clock: Clock) -> None:
    process(tmp_path, 9, "ray::IDLE")
    assert wait_for_worker_exit(30, tmp_path)
    assert clock.seconds == 0


def test_a_pod_stops_when_its_last_worker_has_ended(tmp_path: Path, clock: Clock) -> None:
    process(tmp_path, 8, "ray::RayWorker")
    clock.due.append((7.0, (tmp_path / "8" / "cmdline").unlink))
    assert wait_for_worker_exit(30, tmp_path)
    assert 7 <= clock.seconds < 8


def test_workers_that_stay_are_waited_for_a_bounded_time(tmp_path: Path, clock: Clock) -> None:
    process(tmp_path, 8, "ray::RayWorker")
    assert not wait_for_worker_exit(30, tmp_path)
    assert 29 < clock.seconds <= 30


@pytest.mark.parametrize("program", ["driver_log", "stop_driver", "wait_for_worker_exit"])
def test_the_programs_import_nothing_heavy(program: str) -> None:
    code = f"import sys, rljob_trainer.pod.{program}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(output.split()) - sys.stdlib_module_names
    ours = {name for name in loaded if name.startswith("rljob")}
    assert ours == {"rljob_api", "rljob_trainer"}
    assert not loaded & {"pydantic", "numpy", "torch", "ray", "yaml", "httpx"}
