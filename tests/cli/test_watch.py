"""`rljob watch` until the job finishes, on a real API server; the tests play the operator between two polls."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from rich.console import Console

from rljob.cluster import ClusterOptions, connect
from rljob.errors import ClusterUnreachableError
from rljob_api.constants import ANNOTATION_RETRY
from rljob_cli.cluster.watching import watch_job
from rljob_testing.cli import job_statuses, job_steering
from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.messages import Mentions

pytestmark = pytest.mark.apiserver

START = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
SINCE = "2026-01-31T12:30:00Z"
AGAIN = "rljob status small --watch"


class TcpGate:
    """Listens on `port` and forwards everything; while it is closed, new connections are refused and old ones are
    cut."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener: socket.socket | None = None
        self._open_sockets: list[socket.socket] = []
        self.port = 0

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Accepts connections, on the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """Cuts all connections and accepts no more."""
        sockets = [*self._open_sockets, *([self._listener] if self._listener else [])]
        self._listener, self._open_sockets = None, []
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._target)
                self._open_sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def watched(
    cluster: JobCluster, steps: Sequence[Callable[[], None]], *, is_terminal: bool = False, name: str = "small"
) -> tuple[int, str]:
    output = io.StringIO()
    console = Console(file=output, highlight=False, force_terminal=is_terminal, width=100, height=40)
    api = connect(ClusterOptions(kubeconfig=cluster.kubeconfig))
    api.flags = ""
    code = watch_job(api, name, console, job_steering.Script(steps, START).clock())
    return code, output.getvalue()


def write_status(cluster: JobCluster, *conditions: dict[str, object], phase: str = "Running") -> Callable[[], None]:
    return lambda: cluster.write_status("small", {"phase": phase, "conditions": list(conditions)})


VALID = job_statuses.condition("SpecValid", "True", "Valid", SINCE)
PENDING = job_statuses.condition("ClusterReady", "False", "PodsPending", SINCE, "0 of 2 pods are ready")
READY = job_statuses.condition("ClusterReady", "True", "Ready", SINCE)
COMPLETE = job_statuses.condition("Complete", "True", "Succeeded", SINCE, "80 steps")
FAILED = job_statuses.condition(
    "Failed", "True", "ApplicationError", SINCE, "exit code 1\nZeroDivisionError: division by zero"
)


def test_every_change_is_one_line_and_the_end_is_the_whole_status(small: JobCluster) -> None:
    def progress() -> None:
        small.write_status("small", {"progress": {"step": 1, "totalSteps": 80, "updatedAt": SINCE, "etaSeconds": 300}})

    nothing: list[Callable[[], None]] = [lambda: None] * 3
    steps = [
        write_status(small, VALID, PENDING),
        *nothing,
        write_status(small, VALID, READY),
        progress,
        write_status(small, VALID, READY, COMPLETE),
    ]
    code, output = watched(small, steps)
    assert code == 0
    lines = output.splitlines()
    assert lines[:7] == [
        Mentions("2026-01-31T12:30:00Z", "operator"),
        "2026-01-31T12:30:02Z  SpecValid=True Valid",
        "2026-01-31T12:30:02Z  ClusterReady=False PodsPending: 0 of 2 pods are ready",
        "2026-01-31T12:30:10Z  ClusterReady=True Ready",
        "2026-01-31T12:30:12Z  step 1/80, ETA 5m",
        "2026-01-31T12:30:14Z  Complete=True Succeeded: 80 steps",
        f"RLJob {small.namespace}/small   Running   age 0s",
    ]
    assert lines[-1] == "  Complete      True    Succeeded  14s    80 steps"


def test_watch_does_not_end_with_a_failure_that_is_being_retried(small: JobCluster) -> None:
    ended = {"outcome": "Failed", "reason": "ApplicationError", "at": SINCE}

    def continue_job() -> None:
        small.write_status("small", {"result": None, "conditions": [VALID], "handledRequests": {"retry": "now"}})

    small.write_status("small", {"phase": "Failed", "conditions": [VALID, FAILED], "result": ended})
    small.annotate("small", {ANNOTATION_RETRY: "now"})
    code, output = watched(small, [lambda: None, continue_job, write_status(small, VALID, COMPLETE, phase="Complete")])
    assert code == 0
    assert "Complete=True Succeeded" in output


def test_every_attempt_is_reported(small: JobCluster) -> None:
    first = {"number": 1, "cluster": "small-1", "started": SINCE, "state": "Running"}
    lost = {"ended": SINCE, "state": "Ended", "outcome": "Failed", "reason": "HeadLost", "message": "node n7\nlost"}
    second = {"number": 2, "cluster": "small-2", "started": SINCE, "state": "Provisioning"}
    waits = {"reason": "HeadLost", "failureClass": "Infrastructure", "notBefore": "2026-01-31T12:31:00Z"}

    def status(**fields: object) -> Callable[[], None]:
        return lambda: small.write_status("small", fields)

    steps = [
        status(conditions=[VALID], attempts=[first]),
        status(attempts=[first | lost], nextAttempt=waits),
        status(attempts=[first | lost, second], nextAttempt=None),
        status(attempts=[first | lost, second | {"state": "Running", "resumedFromStep": 10}]),
        status(suspendedAt=SINCE),
        status(conditions=[VALID, COMPLETE]),
    ]
    code, output = watched(small, steps)
    assert code == 0
    assert output.splitlines()[2:8] == [
        "2026-01-31T12:30:04Z  attempt 1: Failed, HeadLost: node n7 lost",
        Mentions("2026-01-31T12:30:04Z  next: attempt 2", "2026-01-31T12:31:00Z", "new cluster", "HeadLost"),
        "2026-01-31T12:30:06Z  attempt 2: Provisioning",
        "2026-01-31T12:30:08Z  attempt 2: Running, resumed from step 10",
        f"2026-01-31T12:30:10Z  suspended since {SINCE}",
        "2026-01-31T12:30:12Z  Complete=True Succeeded: 80 steps",
    ]


def test_a_failure_ends_the_command_with_1_and_the_reason(small: JobCluster) -> None:
    code, output = watched(small, [write_status(small, VALID, FAILED, phase="Failed")])
    assert code == 1
    assert "Failed=True ApplicationError: exit code 1 ZeroDivisionError: division by zero\n" in output
    assert output.endswith("  Failed, ApplicationError:\n    exit code 1\n    ZeroDivisionError: division by zero\n")


def test_a_finished_job_is_shown_once(small: JobCluster) -> None:
    write_status(small, VALID, COMPLETE)()
    code, output = watched(small, [])
    assert code == 0
    assert output.count("Complete=True") == 1


def test_a_job_that_is_deleted_meanwhile_ends_the_command_with_3(small: JobCluster) -> None:
    code, output = watched(small, [lambda: small.delete("small")])
    assert code == 3
    assert output == Mentions("2026-01-31T12:30:02Z  RLJob small", "deleted")


def test_a_short_outage_of_the_server_is_bridged_and_a_long_one_is_not(small: JobCluster, tmp_path: Path) -> None:
    gate = TcpGate("127.0.0.1", int(small.server.url.rpartition(":")[2]))
    with gate:
        file = tmp_path / "through-gate"
        file.write_text(small.server.kubeconfig(url=f"https://127.0.0.1:{gate.port}", namespace=small.namespace))
        through_gate = JobCluster(small.server, small.namespace, file)

        def comes_back() -> None:
            write_status(small, VALID, COMPLETE)()
            gate.open()

        code, output = watched(through_gate, [gate.close, lambda: None, comes_back])
        assert code == 0
        assert output.count("no usable response from the API server") == 1
        assert "2026-01-31T12:30:06Z  Complete=True" in output

        write_status(small, VALID)()
        with pytest.raises(ClusterUnreachableError):
            watched(through_gate, [gate.close])


def test_ctrl_c_does_not_change_the_job(small: JobCluster) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    code, output = watched(small, [interrupt])
    assert code == 130
    assert output.splitlines()[-1] == Mentions("stopped watching", "continues", "rljob status small --watch")
    assert small.job("small")["metadata"]["generation"] == 1  # type: ignore[index]


def test_the_live_view_is_drawn_in_place_with_a_bar(small: JobCluster) -> None:
    def runs() -> None:
        small.write_status("small", job_statuses.full_status())

    ends = job_statuses.full_status()
    assert isinstance(ends["conditions"], list)
    ends["conditions"].append(COMPLETE)

    code, output = watched(small, [runs, lambda: small.write_status("small", ends)], is_terminal=True)
    assert code == 0
    assert output == Mentions("no operator")
    assert "━━━━" in output
    assert "\x1b[2K" in output  # lines are erased, so the view stays in place
    last = output[output.rindex("RLJob") :]
    assert "step         12/80" in last
    assert "Complete" in last


def read_until(terminal: int, text: str, deadline_seconds: float = 60.0) -> str:
    seen = b""
    deadline = time.monotonic() + deadline_seconds
    while text.encode() not in seen:
        assert time.monotonic() < deadline, f"{text!r} is not in {seen!r}"
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536)
    return seen.decode(errors="replace")


def test_ctrl_c_on_a_real_terminal_has_no_traceback(small: JobCluster) -> None:
    write_status(small, VALID, PENDING)()
    ours, theirs = pty.openpty()
    environment = small.environment | {"COLUMNS": "100", "TERM": "xterm"}
    command = [sys.executable, "-m", "rljob_cli", "status", "small", "--watch"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        try:
            read_until(ours, "PodsPending")
            process.send_signal(signal.SIGINT)
            output = read_until(ours, "rljob status small --watch")
            assert process.wait(30) == 130
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)
    assert "Traceback" not in output
    assert "the job continues" in output.replace("\r\n", " ")
