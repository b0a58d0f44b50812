"""The Makefile rejects values that it does not know, and names the known ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rljob_testing.messages import Mentions
from rljob_testing.settings import inherited_environment

REPOSITORY = Path(__file__).parents[2]


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Prints what `make` would do, without doing it."""
    # Without the variables of a `make` that runs these tests: with them it would print more.
    hidden = ("DEVICE", "PART", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in inherited_environment().items() if name not in hidden}
    return subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=REPOSITORY,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("device", ["cuda", ""])
def test_an_unknown_device_is_rejected_also_from_the_environment(device: str) -> None:
    for run in (make("install", f"DEVICE={device}"), make("demo", DEVICE=device)):
        assert (run.returncode, run.stdout) == (2, "")
        assert run.stderr == Mentions("DEVICE", "cpu or gpu", f"seen: {device}")


@pytest.mark.parametrize("arguments", [(), ("PART=everything",)])
def test_an_unknown_experiment_is_rejected(arguments: tuple[str, ...]) -> None:
    run = make("proof", *arguments)
    assert run.returncode == 2
    assert run.stderr == Mentions("PART", "algorithms", "reward-model", "survival")


def test_every_experiment_is_known() -> None:
    for file in (REPOSITORY / "proof").glob("*.py"):
        run = make("proof", f"PART={file.stem.replace('_', '-')}")
        assert (run.returncode, f"proof/{file.name}" in run.stdout) == (0, True)
