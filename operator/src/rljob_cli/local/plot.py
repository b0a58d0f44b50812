"""`rljob plot`: draws the curves of a run again, from its metrics."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rljob_cli.local.run import TRAINER_PACKAGE, trainer_module_command


def plot(run_folder: Path) -> int:
    """Draws into `run_folder`/plots in a process of the trainer; returns its exit code.

    Raises:
        CliError: the trainer is not installed.
    """
    command = trainer_module_command(f"{TRAINER_PACKAGE}.observability.plots")
    return subprocess.run([*command, str(run_folder)], check=False).returncode
