"""The facts about the machine and its software that a result depends on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from rljob_trainer.control_groups import num_usable_cores

REPOSITORY = Path(__file__).parents[2]


def described_machine() -> dict[str, str]:
    """Processor, cores, memory, kernel, Python."""
    processor = _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    gibibytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": processor,
        "cores": str(num_usable_cores()),
        "memory": f"{gibibytes:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def installed_versions(names: Sequence[str]) -> dict[str, str]:
    """Versions of the distributions that are installed in this process's environment."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit(folder: Path = REPOSITORY) -> str:
    """The commit of a checkout, with a plus sign if files have changed since; `unknown` outside git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=9", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def today() -> str:
    """The current date in UTC."""
    return datetime.now(UTC).date().isoformat()


def load() -> float:
    """Load average of the last minute."""
    return os.getloadavg()[0]


def _field(file: str, name: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
