"""A sandbox that fails: what is a failure of the machine is never a score. The sandbox is real."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_testing.sandbox.code_scorer import SPEC
from rljob_trainer.errors import ConfigurationError, ResourceError
from rljob_trainer.rewards.base import RewardRequest, RewardStatus
from rljob_trainer.rewards.code import TRIAL
from rljob_trainer.rewards.process_pool import ScorerPool
from rljob_trainer.rewards.scorer_environment import scorer_environment
from rljob_trainer.sandbox.confinement import SECONDS_TO_SIGKILL
from rljob_trainer.sandbox.programs import Mode
from rljob_trainer.sandbox.sandbox import (
    ProgramLimits,
    Sandbox,
    SandboxError,
    SandboxKilledError,
    SandboxUnavailableError,
    failure_of,
)
from rljob_trainer.sandbox.watching import Process

ANSWER = {"inputs": ["1 2"], "outputs": ["3"]}
CODE = "print(sum(map(int, input().split())))"
STATEMENT = "assert add(1, 2) == 3"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ScorerPool]:
    with ScorerPool(
        replace(SPEC, test_seconds=60.0, response_seconds=60.0),
        name="score",
        num_processes=1,
        timeout_seconds=120,
        log_folder=tmp_path,
        environment=scorer_environment(os.environ, []),
    ) as pool:
        pool.wait_until_ready()
        yield pool


def test_a_killed_sandbox_is_a_failure_of_the_machine_and_not_a_score(pool: ScorerPool, tmp_path: Path) -> None:
    request = RewardRequest("", f"```python\n{CODE}\n```", ANSWER, {})
    assert pool.submit([request]).result()[0].score == 1.0
    assert "sandbox: seccomp" in (tmp_path / "reward-score-0.log").read_text()
    # The kernel ends the largest process if memory runs out; here the zygote is ended, in both attempts.
    (first,) = pool.process_ids()
    os.kill(zygote_of(first), signal.SIGKILL)
    (outcome,) = pool.submit([request]).result()
    assert (outcome.status, outcome.score) == (RewardStatus.OK, 1.0)
    assert pool.process_ids() != [first]
    log = (tmp_path / "reward-score-0.log").read_text()
    assert "the sandbox's parent process (zygote) was killed by SIGKILL, probably because the machine is out of" in log
    endless = RewardRequest("", "```python\nopen('begun', 'w')\nwhile True: pass\n```", ANSWER, {})
    future, seen = pool.submit([endless]), set[int]()
    for _ in range(2):
        os.kill(program_of(pool.process_ids, seen), signal.SIGKILL)
    (outcome,) = future.result()
    assert (outcome.status, outcome.score) == (RewardStatus.KILLED, None)


def test_a_killed_process_of_the_code_is_no_failure_of_the_statement() -> None:
    sandbox, code = Sandbox(256 << 20), "def add(a, b):\n    open('begun', 'w')\n    while True: pass"
    with ThreadPoolExecutor() as threads:
        run = threads.submit(sandbox.run_statement, code, STATEMENT, ProgramLimits(60.0, 1000))
        os.kill(program_of(lambda: [os.getpid()], set()), signal.SIGKILL)
        with pytest.raises(SandboxKilledError):
            run.result()


def test_a_process_that_was_killed_from_outside_is_not_killed_again() -> None:
    ended = subprocess.Popen(["sleep", "100"])
    running = subprocess.Popen(["sleep", "100"])
    ended.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    processes = [Process(each.pid, os.pidfd_open(each.pid), None, []) for each in (ended, running)]
    for process in processes:
        process.kill()
        os.close(process.pidfd)
    assert [each.was_killed for each in processes] == [False, True]
    assert [ended.wait(), running.wait()] == [-signal.SIGKILL, -signal.SIGKILL]


def test_sigkill_before_the_hard_limit_of_cpu_time_is_not_the_codes_fault() -> None:
    process = Process(1, -1, None, [])
    limits = ProgramLimits(2.0, 1000)
    hard_limit = limits.cpu_seconds + SECONDS_TO_SIGKILL
    # The kernel sends SIGKILL at the hard limit, and reports a little less.
    for seconds in (hard_limit, hard_limit - 2e-6):
        ending = {"status": signal.SIGKILL, "cpu_seconds": seconds}
        assert failure_of(process, ending, limits) == "used too much processor time"
    with pytest.raises(SandboxKilledError):
        failure_of(process, {"status": signal.SIGKILL, "cpu_seconds": hard_limit - 1}, limits)


def test_a_machine_without_seccomp_refuses_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise SandboxUnavailableError("the kernel refuses seccomp (Invalid argument)")

    monkeypatch.setattr("rljob_trainer.rewards.code.Sandbox", refuses)
    with pytest.raises(ConfigurationError, match="cannot be confined on this machine: the kernel refuses seccomp"):
        SPEC.load()


def test_code_that_is_not_confined_refuses_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob_trainer.rewards.code.TRIAL", TRIAL.replace("os.fork", "os.getpid"))
    with pytest.raises(ConfigurationError, match=r"cannot be confined .*: a forbidden system call succeeded"):
        SPEC.load()


def test_a_sandbox_that_cannot_start_is_a_failure_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with no_more_descriptors(), pytest.raises(ResourceError, match=r"the sandbox failed .* Too many open files"):
        SPEC.load()
    monkeypatch.setattr("rljob_trainer.rewards.code.TRIAL", "bytearray(1 << 30)")
    with pytest.raises(ResourceError, match=r"the sandbox failed .* MemoryError; .* increase code\.memory"):
        SPEC.load()
    monkeypatch.setattr("sys.executable", "/none/python")
    with pytest.raises(ResourceError, match=r"the sandbox failed .* No such file"):
        SPEC.load()


def test_a_pool_that_cannot_start_its_processes_is_a_failure_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/none/python")
    with (
        ScorerPool(SPEC, name="score", num_processes=1, timeout_seconds=9, log_folder=tmp_path, environment={}) as pool,
        pytest.raises(ResourceError, match=r"a scoring process could not be started: .* No such file"),
    ):
        pool.wait_until_ready()


def test_errors_of_the_scoring_process_are_not_failures_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox, limits = Sandbox(256 << 20), ProgramLimits(10.0, 1000)
    runs = (
        lambda: sandbox.run(Mode.SCRIPT, {"code": "print(1)"}, b"", limits),
        lambda: sandbox.run_statement("def add(a, b): return 3", STATEMENT, limits),
    )
    for run in runs:
        # Of the descriptors that a run needs, some or all are missing.
        for num_left in range(12):
            with no_more_descriptors(num_left), contextlib.suppress(SandboxError):
                assert run().failure == ""
        with no_more_descriptors(), pytest.raises(SandboxError, match="Too many open files"):
            run()
    monkeypatch.setattr("tempfile.tempdir", "/none")
    for run in runs:
        with pytest.raises(SandboxError, match="No such file"):
            run()
    monkeypatch.undo()
    assert [run().failure for run in runs] == ["", ""]


@contextlib.contextmanager
def no_more_descriptors(num_left: int = 0) -> Iterator[None]:
    """This process can open only `num_left` more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    probes = [os.open("/dev/null", os.O_RDONLY)]
    while len(probes) <= num_left:
        probes.append(os.open("/dev/null", os.O_RDONLY))
    for probe in probes:
        os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(probes), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def children_of(parent: int) -> list[int]:
    found = []
    for each in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(each))
    return found


def zygote_of(scoring_process: int) -> int:
    (found,) = children_of(scoring_process)
    return found


def program_of(scoring_processes: Callable[[], Sequence[int]], seen: set[int]) -> int:
    """The process of the program that runs now, as soon as it has created its file `begun`. Not one of `seen`."""
    while True:
        for process in scoring_processes():
            for zygote in children_of(process):
                for program in set(children_of(zygote)) - seen:
                    with contextlib.suppress(OSError):
                        if "begun" in os.listdir(f"/proc/{program}/cwd"):
                            seen.add(program)
                            return program
        time.sleep(0.01)
