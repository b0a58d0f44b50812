"""Runs `python -m rljob_trainer.pod.dump_stacks` as the operator does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TypedDict

from rljob_testing.settings import inherited_environment
from rljob_trainer.pod.dump_stacks import TOTAL_SECONDS

SECONDS_TO_START = 60.0
"""Time for the start on a busy machine, beyond the program's own limit. Ray's own timeouts are minutes."""
PROGRAM = """
import sys
from rljob_trainer.pod import dump_stacks
dump_stacks.TOTAL_SECONDS, dump_stacks.HERE_SECONDS = {total}, {total} / 4
sys.exit(dump_stacks.main())
"""


class DumpedProcess(TypedDict):
    """The entry of one process in the summary."""

    pod: str | None
    node: str | None
    host: str
    processId: int
    role: str
    rank: int | None
    title: str
    state: str
    stoodAt: str
    stoodWithin: str
    file: str


class Dump(TypedDict):
    """The summary that the program prints."""

    processes: list[DumpedProcess]
    silentNodes: list[dict[str, str]]
    folder: str | None
    error: str | None


def dumped_stacks(run_folder: Path, ray_address: str, total_seconds: float = TOTAL_SECONDS, **variables: str) -> Dump:
    """Runs the program, checks that it ends in time, and returns its last line.

    `total_seconds`: its time limit. A quarter of it is for the processes of its own node.
    """
    environment = inherited_environment() | {
        "RLJOB_RUN_FOLDER": str(run_folder),
        "RAY_ADDRESS": ray_address,
        **variables,
    }
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(total=total_seconds)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert time.monotonic() - began < total_seconds + SECONDS_TO_START
    assert ended.returncode == 0, ended.stdout + ended.stderr
    dump: Dump = json.loads(ended.stdout.splitlines()[-1])
    return dump
