"""The stacks of other processes, whatever they are doing, without disturbing them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rljob_testing.settings import inherited_environment
from rljob_trainer.stack_traces import DUMP_SIGNAL, PYTHON_SIGNAL, Stacks, take_stacks, traced_processes

PROGRAM = """
import ctypes, faulthandler, os, signal, sys, threading, time
from rljob_trainer.stack_traces import StackFile

stacks = StackFile(sys.argv[1], "worker")
stacks.rename("first role", 3)

def sleeping():
    print("there", flush=True)
    time.sleep(600)

def computing():
    print("there", flush=True)
    sum(range(10**15))

def in_c_with_the_lock():
    print("there", flush=True)
    ctypes.PyDLL(None).read(os.pipe()[0], b" ", 1)

def forked():
    if os.fork() == 0:
        sleeping()
    time.sleep(600)

def beside_a_thread():
    threading.Thread(target=time.sleep, args=(600,)).start()
    sleeping()

def generating():
    from rljob_trainer.engines.rollout.loop import EngineLoop

    class Engine:
        def clear_cache(self):
            sleeping()

        def has_unfinished(self):
            return False

    loop = EngineLoop(Engine())
    loop.submit([])
    loop.wait_until_idle()

def ending():
    faulthandler.unregister(44)
    signal.signal(45, signal.SIG_IGN)
    sleeping()

def exiting():
    def late():
        print("there", flush=True)
        time.sleep(600)

    import atexit
    # Runs after what StackFile has registered, as the end of the interpreter does.
    atexit._run_exitfuncs()
    late()

def becoming_another():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    print("there", flush=True)
    signal.sigwait([signal.SIGUSR1])
    stacks.rename("second role", 4)
    sleeping()

def calling_in_threads():
    def called(depth):
        return called(depth - 1) if depth else 0

    def calling():
        while True:
            called(20)

    for _ in range(3):
        threading.Thread(target=calling, daemon=True).start()
    sleeping()

def counting():
    print("there", flush=True)
    total = 0
    while not os.path.exists(sys.argv[1] + "/enough"):
        total += sum(range(1000)) == 499500
    print("sums are right" if total and stacks else "", flush=True)

globals()[sys.argv[2]]()
"""


PRINTS = 'print("there", flush=True)'
"""A line where the program may still be when the other side reads its output."""

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the program in one of its modes; the run's folder is the test's."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(way: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py"), str(tmp_path), way],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=inherited_environment(),
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def taken(folder: Path, seconds: float = 300.0) -> list[Stacks]:
    return take_stacks(traced_processes(folder), seconds)


@pytest.mark.parametrize(
    ("way", "line"),
    [
        ("sleeping", "time.sleep(600)"),
        ("computing", "sum(range(10**15))"),
        ("in_c_with_the_lock", 'ctypes.PyDLL(None).read(os.pipe()[0], b" ", 1)'),
    ],
)
def test_a_hanging_process_shows_where_it_hangs(tmp_path: Path, start: Start, way: str, line: str) -> None:
    process = start(way)
    [stacks] = taken(tmp_path)
    while stacks.innermost_frame.rpartition(":")[2] == f"{line_of(way, PRINTS)} {way}":
        [stacks] = taken(tmp_path)
    assert (stacks.process_id, stacks.role, stacks.rank) == (process.pid, "first_role", 3)
    number = line_of(way, line)
    assert stacks.innermost_frame == stacks.innermost_frame_outside_libraries == f"{tmp_path}/program.py:{number} {way}"
    assert stacks.state == ("R" if way == "computing" else "S")
    assert f'File "{tmp_path}/program.py", line {number} in {way}' in stacks.text


def line_of(way: str, line: str) -> int:
    lines = PROGRAM.splitlines()
    return lines.index(f"    {line}", lines.index(f"def {way}():")) + 1


def test_a_process_continues_and_can_be_asked_again(tmp_path: Path, start: Start) -> None:
    process = start("counting")
    seen = [len(each.text) for _ in range(5) for each in taken(tmp_path)]
    assert len(seen) == 5
    assert max(seen) < 2 * min(seen)
    (tmp_path / "enough").touch()
    assert process.stdout is not None
    assert process.stdout.readline() == "sums are right\n"


def test_the_stacks_of_running_threads_are_written_by_the_handler_in_python(tmp_path: Path, start: Start) -> None:
    """That of faulthandler would read them while they change, and would crash the process in rare cases."""
    start("calling_in_threads")
    [traced] = traced_processes(tmp_path)
    [stacks] = take_stacks([traced], 300.0)
    assert stacks.text.count(" in calling\n") >= 3
    assert "_write_stacks" not in stacks.text
    while b"_write_stacks" not in traced.file.read_bytes():
        time.sleep(0.01)


def test_the_main_thread_is_distinguished_from_others(tmp_path: Path, start: Start) -> None:
    start("beside_a_thread")
    [stacks] = taken(tmp_path)
    assert stacks.text.count("most recent call first") == 2
    assert stacks.innermost_frame.endswith(" sleeping")


def test_the_thread_of_a_rollout_engine_is_shown(tmp_path: Path, start: Start) -> None:
    """The main thread waits for it."""
    start("generating")
    [found] = taken(tmp_path)
    assert found.innermost_frame_outside_libraries.endswith(" _wait_for_engine")
    engine = found.text.index(" in clear_cache\n")
    assert found.text.index(" in _run_until_empty\n") > engine


def test_a_forked_process_has_stacks_of_its_own(tmp_path: Path, start: Start) -> None:
    process = start("forked")
    both = taken(tmp_path)
    assert {each.process_id: each.innermost_frame.rpartition(" ")[2] for each in both} == {
        process.pid: "forked",
        next(each.process_id for each in both if each.process_id != process.pid): "sleeping",
    }


def test_a_stopped_process_is_neither_waited_for_nor_signalled(tmp_path: Path, start: Start) -> None:
    process = start("sleeping")
    os.kill(process.pid, signal.SIGSTOP)
    while not traced_stopped(process.pid):
        time.sleep(0.01)
    began = time.monotonic()
    [stacks] = taken(tmp_path)
    assert time.monotonic() - began < 150
    assert stacks.text == ""
    assert stacks.state == "T (stopped by a signal)"
    assert stacks.innermost_frame.startswith("unknown: the process is stopped by a signal")


@pytest.mark.parametrize("way", ["ending", "exiting"])
def test_processes_that_start_or_end_without_a_handler_are_not_signalled(
    tmp_path: Path, start: Start, way: str
) -> None:
    process = start(way)
    [stacks] = taken(tmp_path)
    assert stacks.innermost_frame.startswith("unknown: the process is starting or exiting")
    # Also if the handler disappears between the check and the signal.
    for number in (PYTHON_SIGNAL, DUMP_SIGNAL):
        os.kill(process.pid, number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)


def test_a_process_that_just_took_its_role_is_not_waited_for(tmp_path: Path, start: Start) -> None:
    process = start("becoming_another")
    found = traced_processes(tmp_path)
    os.kill(process.pid, signal.SIGUSR1)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    began = time.monotonic()
    [stacks] = take_stacks(found, 300.0)
    assert time.monotonic() - began < 150
    assert (stacks.role, stacks.text) == ("first_role", "")
    assert stacks.innermost_frame.startswith("unknown: the process is starting or exiting")
    assert [(each.role, each.rank) for each in taken(tmp_path)] == [("second_role", 4)]


def test_processes_of_other_runs_and_dead_ones_are_not_signalled(tmp_path: Path, start: Start) -> None:
    process = start("sleeping")
    assert traced_processes(tmp_path / "other") == []
    found = traced_processes(tmp_path)
    process.kill()
    process.wait()
    [stacks] = take_stacks(found, 60.0)
    assert stacks.innermost_frame == "unknown: the process is no longer running"
    assert traced_processes(tmp_path) == []


def traced_stopped(process_id: int) -> bool:
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "T"
