"""A Ray cluster of one small node, for runs that are given one instead of starting their own."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rljob_testing.settings import inherited_environment

MAX_STARTS = 3
START_SECONDS = 120.0


@contextmanager
def ray_cluster(num_cpus: int, log_file: Path) -> Iterator[str]:
    """Its address."""
    process, address = _started(num_cpus, log_file)
    try:
        yield address
    finally:
        _stop(process)


def _started(num_cpus: int, log_file: Path) -> tuple[subprocess.Popen[bytes], str]:
    """On a machine with much else to do Ray's own start can time out, so there is more than one try."""
    for _ in range(MAX_STARTS):
        process = _start(num_cpus, log_file)
        address = _address(process, log_file)
        if address is not None:
            return process, address
        _stop(process)
    raise AssertionError(f"Ray did not start:\n{log_file.read_text()}")


def _start(num_cpus: int, log_file: Path) -> subprocess.Popen[bytes]:
    with log_file.open("w") as output:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"),
                *("--include-dashboard=false", "--disable-usage-stats", f"--num-cpus={num_cpus}", "--num-gpus=0"),
            ],
            env=inherited_environment() | {"CUDA_VISIBLE_DEVICES": "", "RAY_AUTH_MODE": "disabled"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _address(process: subprocess.Popen[bytes], log_file: Path) -> str | None:
    """Waits for it; None when the start failed."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        found = re.search(r"--address='([^']+)'", log_file.read_text())
        if found:
            return found[1]
        time.sleep(0.1)
    return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(timeout=60)
