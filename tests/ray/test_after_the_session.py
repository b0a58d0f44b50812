"""After the connection to Ray is closed, what is left of worker groups raises an error and opens no new connection.
Runs in a process of its own that nothing else has connected to Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rljob_testing.ray_clusters import echo_workers
from rljob_testing.settings import inherited_environment

pytestmark = [pytest.mark.ray]

PROGRAM = """
import gc
import sys
import threading
import time

import ray

from rljob_testing.ray_clusters.echo_workers import call, mixed_batch, echo_processes
from rljob_trainer.groups.ray_session import ray_session
from rljob_trainer.groups.worker_group import spawn
from rljob_trainer.errors import ResourceError

with ray_session(sys.argv[1], 0, 0):
    started = echo_processes(1)
    processes = started.__enter__()
    group = spawn(processes)["first"]
    pending = call(group, "add_later", mixed_batch(2))
for use in (lambda: call(group, "empty"), lambda: pending.result(1.0), lambda: pending.done()):
    try:
        use()
    except ResourceError as error:
        print(error)
started.__exit__(None, None, None)
time.sleep(2.5)
gc.collect()
print(ray.is_initialized(), [thread.name for thread in threading.enumerate() if thread.name == "liveness"])
"""


def test_calls_after_the_session_raise_and_do_not_reconnect_to_ray(tmp_path: Path, cluster: str) -> None:
    environment = {**inherited_environment(), "PYTHONPATH": echo_workers.PYTHON_PATH}
    command = [sys.executable, "-c", PROGRAM, cluster]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    advice = "the connection to Ray is closed; make calls within `ray_session`"
    first, second, third, last = ended.stdout.splitlines()
    assert first == f"first.empty: {advice}"
    assert second == third == f"first.add_later: {advice}"
    assert last == "False []"
