"""The time limit of a response is of time in which this machine runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rljob_trainer.rewards import process_pool
from rljob_trainer.rewards.base import RewardRequest
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.process_pool import ScorerPool, scorer_environment

REWARD = """
import time
from pathlib import Path

def score(prompt, response, answer, row):
    folder = Path(__file__).parent
    (folder / "begun").touch()
    while not (folder / "end").exists():
        time.sleep(0.01)
    return 1.0
"""


def test_a_machine_that_stood_still_has_cost_no_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waiting.py").write_text(REWARD)
    seconds_ahead, num_looks = 0.0, 0

    def monotonic() -> float:
        nonlocal num_looks
        num_looks += 1
        return time.monotonic() + seconds_ahead

    monkeypatch.setattr(process_pool, "time", SimpleNamespace(monotonic=monotonic))
    with ScorerPool(
        FunctionScorer("waiting:score", "here"),
        name="score",
        num_processes=1,
        timeout_seconds=300.0,
        log_folder=tmp_path / "logs",
        environment=scorer_environment(os.environ, [], [tmp_path]),
    ) as pool:
        scored = pool.submit([RewardRequest("p", "r", None, {})])
        wait_until((tmp_path / "begun").exists)
        seconds_ahead, looks_then = 1000.0, num_looks
        wait_until(lambda: num_looks > looks_then + 10)
        (tmp_path / "end").touch()
        [outcome] = scored.result(timeout=60)
    assert (outcome.status, outcome.score) == ("OK", 1.0)


BUSY_REWARD = """
import os, time

def spin(seconds):
    while time.process_time() < seconds:
        pass

def score(prompt, response, answer, row):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if not all(os.fork() for _ in range(3)):
        spin(0.4)
        os._exit(0)
    spin(time.process_time() + (0.4 if response == "ends" else 600))
    return 1.0
"""


def test_the_time_limit_does_not_count_what_other_processes_took_of_the_cores(tmp_path: Path) -> None:
    """A reward that needs 0.4 s of a core shares it with three others, so it takes four times as long."""
    (tmp_path / "busy.py").write_text(BUSY_REWARD)
    with ScorerPool(
        FunctionScorer("busy:score", "here"),
        name="score",
        num_processes=1,
        timeout_seconds=0.7,
        log_folder=tmp_path / "logs",
        environment=scorer_environment(os.environ, [], [tmp_path]),
    ) as pool:
        outcomes = pool.submit([RewardRequest("p", each, None, {}) for each in ("ends", "loops")]).result(timeout=60)
    assert [outcome.status for outcome in outcomes] == ["OK", "TIMEOUT"]
    assert outcomes[0].seconds > 0.7


def wait_until(reached: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
