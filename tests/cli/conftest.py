"""A folder with a job file and the stand-in trainer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_testing.command_line import JOB, Workplace


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    """A fresh workplace."""
    package = tmp_path / "code" / "rljob_trainer"
    package.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "stand_in_trainer.py", package / "__main__.py")
    (package / "__init__.py").touch()
    (tmp_path / "job.yaml").write_text(JOB)
    return Workplace(tmp_path)


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], None]:
    """Waits until a condition holds, at most four minutes: a start of Ray on a busy machine takes one."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in 240 s"
            time.sleep(0.02)

    return wait
