"""Code of a response that tries to escape from the sandbox or to do damage: each attempt is stopped, as root, as an
ordinary user without capabilities, and on kernels without Landlock or with an old one.
`rljob_testing.sandbox.attacks` has the attempts, and the end-to-end tests run them in a pod."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import rljob_testing
import rljob_trainer
from rljob_testing.sandbox.attacks import ATTACKS, is_stopped
from rljob_testing.sandbox.run_attacks import OLD_ABI, OLD_LANDLOCK, WITHOUT_LANDLOCK
from rljob_trainer.sandbox.landlock import available_abi

NOBODY = 65534
RUNS: dict[str, tuple[str, ...]] = {
    "this user": (),
    "nobody": (),
    "nobody, without Landlock": (WITHOUT_LANDLOCK,),
    "nobody, with Landlock as before 6.2": (OLD_LANDLOCK,),
}
SOURCES = os.pathsep.join(str(Path(str(each.__file__)).parents[1]) for each in (rljob_trainer, rljob_testing))


@pytest.fixture(
    scope="module",
    params=["nobody", *(pytest.param(each, marks=pytest.mark.long) for each in RUNS if each != "nobody")],
)
def seen(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    """What all attacks did, run as a user."""
    user: dict[str, Any] = {}
    python = sys.executable
    if request.param != "this user" and os.getuid() == 0:
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        python = _python_of_nobody(user)
    result = subprocess.run(
        [python, "-m", "rljob_testing.sandbox.run_attacks", *RUNS[request.param]],
        cwd="/",
        env={"PYTHONPATH": SOURCES, "CANARY": "secret"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **user,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["uid"] == user.get("user", os.getuid())
    return found


def _python_of_nobody(user: Mapping[str, Any]) -> str:
    """A Python that an ordinary user can run; that of the tests may be in root's home folder."""
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            if (
                subprocess.run([python, "-c", "import enum; enum.StrEnum"], check=False, cwd="/", **user).returncode
                == 0
            ):
                return python
        except OSError:
            continue
    pytest.skip("no Python 3.11 that the user nobody can run")


def test_every_attack_is_stopped_and_leaves_nothing(seen: Mapping[str, Any]) -> None:
    escaped = {name: each for name, each in seen["seen"].items() if not each["is_stopped"]}
    assert escaped == {}
    num_expected = sum(seen["layers"]["landlock_abi"] > 0 or not each.needs_landlock for each in ATTACKS.values())
    assert len(seen["seen"]) == num_expected
    assert seen["after"] == ["", "fine\n"]
    assert seen["num_left"] == 0
    assert seen["is_target_unharmed"]


def test_a_program_that_is_left_is_found() -> None:
    leave = """
import os, subprocess
from rljob_testing.sandbox.run_attacks import adopt_orphans, num_children
adopt_orphans()
child = int(subprocess.check_output(["sh", "-c", "sleep 100 >/dev/null & echo $!"]))
print(num_children())
os.kill(child, 9)
os.waitpid(child, 0)
print(num_children())
"""
    found = subprocess.run([sys.executable, "-c", leave], env={"PYTHONPATH": SOURCES}, capture_output=True, check=True)
    assert found.stdout == b"1\n0\n"


@pytest.mark.skipif(available_abi() == 0, reason="this kernel has no Landlock")
def test_landlock_is_used_where_the_kernel_has_it(seen: Mapping[str, Any], request: pytest.FixtureRequest) -> None:
    arguments = RUNS[request.node.callspec.id]
    expected = 0 if WITHOUT_LANDLOCK in arguments else OLD_ABI if OLD_LANDLOCK in arguments else available_abi()
    assert seen["layers"]["landlock_abi"] == expected


@pytest.mark.parametrize("name", ["environment variables", "open descriptors of the sandbox", "files of others"])
def test_the_attacks_would_succeed_without_the_sandbox(name: str, tmp_path: Path) -> None:
    attack = ATTACKS[name]
    read_end, write_end = os.pipe()
    result = subprocess.run(
        [sys.executable, "-c", attack.code_against(os.getpid())],
        cwd=tmp_path,
        env={"CANARY": "secret"},
        pass_fds=(read_end,),
        capture_output=True,
        text=True,
        check=False,
    )
    os.close(read_end)
    os.close(write_end)
    assert not is_stopped(attack, result.stderr, result.stdout)
