"""`rljob run` whose terminal, pipe or log file can no longer be written: the run ends as it would otherwise."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_testing.cli.rljob_command import JobFolder
from rljob_testing.settings import inherited_environment

WaitFor = Callable[[Callable[[], bool]], None]
COMMAND = [sys.executable, "-m", "rljob_cli", "run", "job.yaml", "--code", "code"]


pytestmark = pytest.mark.usefixtures("default_hangup")


def last_attempt(folder: Path) -> object:
    return json.loads((folder / "attempts.jsonl").read_text().splitlines()[-1]).get("exitCode")


def test_a_closed_terminal_saves_a_checkpoint(workplace: JobFolder, wait_for: WaitFor) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(workplace.folder)
        os.execve(COMMAND[0], COMMAND, inherited_environment() | {"STAND_IN": "wait"})
    try:
        wait_for((workplace.run_folder / "metrics.jsonl").exists)
    finally:
        # The kernel sends SIGHUP, and every later write to the terminal fails.
        os.close(terminal)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert last_attempt(workplace.run_folder) == 130
    assert (workplace.run_folder / "checkpoints" / "step-1").is_dir()


def test_the_closed_terminal_of_a_shell_saves_a_checkpoint(workplace: JobFolder, wait_for: WaitFor) -> None:
    """The shell sends SIGHUP and, when the shell has exited, the kernel does so again."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(workplace.folder)
        os.execve("/bin/bash", ["bash", "--norc", "-i"], inherited_environment() | {"STAND_IN": "wait"})
    try:
        os.write(terminal, f"{shlex.join(COMMAND)}\n".encode())
        wait_for((workplace.run_folder / "metrics.jsonl").exists)
    finally:
        os.close(terminal)
        os.waitpid(child, 0)
    # The shell does not wait for the run, which first saves its checkpoint.
    wait_for((workplace.run_folder / "attempts.jsonl").exists)
    wait_for(lambda: last_attempt(workplace.run_folder) is not None)
    assert last_attempt(workplace.run_folder) == 130
    assert (workplace.run_folder / "checkpoints" / "step-1").is_dir()


def test_a_second_hangup_does_not_stop_at_once(workplace: JobFolder, wait_for: WaitFor) -> None:
    process = workplace.start(mode="deaf")
    wait_for((workplace.run_folder / "metrics.jsonl").exists)
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 137


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "completed"])
def test_a_closed_pipe_does_not_change_the_end(workplace: JobFolder, wait_for: WaitFor, is_stopped: bool) -> None:
    process = workplace.start(mode="wait" if is_stopped else "finish")
    wait_for((workplace.run_folder / "attempts.jsonl").exists)
    assert process.stdout is not None
    process.stdout.close()
    if is_stopped:
        wait_for((workplace.run_folder / "metrics.jsonl").exists)
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == (130 if is_stopped else 0)
    assert last_attempt(workplace.run_folder) == process.returncode
    assert any((workplace.run_folder / "checkpoints").iterdir())


def test_a_full_log_file_does_not_change_the_end(workplace: JobFolder) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            COMMAND, cwd=workplace.folder, env=inherited_environment(), stdout=full, stderr=full, timeout=120
        )
    assert (done.returncode, last_attempt(workplace.run_folder)) == (0, 0)


def test_nohup_keeps_a_run_alive(workplace: JobFolder, wait_for: WaitFor) -> None:
    environment = inherited_environment() | {"STAND_IN": "wait"}
    nothing = subprocess.DEVNULL
    with subprocess.Popen(
        ["nohup", *COMMAND], cwd=workplace.folder, env=environment, stdin=nothing, stdout=nothing, stderr=nothing
    ) as process:
        wait_for((workplace.run_folder / "metrics.jsonl").exists)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert not (workplace.run_folder / "checkpoints").exists()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130
