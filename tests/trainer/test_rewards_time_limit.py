"""The time limit of a response counts only time in which this machine runs."""

from __future__ import annotations

import itertools
import os
import selectors
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.v1alpha1.reward import CodeReward, Reward, RewardType
from rljob_trainer.processes.child_process import CoreUse
from rljob_trainer.rewards import pool_slots, process_pool
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest
from rljob_trainer.rewards.format import FormatScorer
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.loading import scorer_spec
from rljob_trainer.rewards.pool_slots import QueuedCall
from rljob_trainer.rewards.process_pool import ScorerPool
from rljob_trainer.rewards.scorer_environment import scorer_environment
from rljob_trainer.rewards.scoring_child import ScoringChild
from rljob_trainer.workers.reward import RewardSettings, ScorerSettings

REWARD = """
import time
from pathlib import Path

def score(prompt, response, answer, row):
    folder = Path(__file__).parent
    (folder / "begun").touch()
    if response == "hangs":
        time.sleep(600)
    while not (folder / "end").exists():
        time.sleep(0.01)
    return 1.0
"""


class ChangedClock:
    """The pool's clock: it jumps at each wait of its thread, or between two of them."""

    def __init__(self) -> None:
        self.seconds_ahead = 0.0
        self.num_waits = 0
        self.jumps_in_wait: Iterator[float] = iter(())
        self.jumps_after_wait: Iterator[float] = iter(())

    def monotonic(self) -> float:
        return time.monotonic() + self.seconds_ahead

    def selector(self) -> selectors.DefaultSelector:
        clock = self

        class Selector(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
                found = super().select(timeout)
                clock.num_waits += 1
                clock.seconds_ahead += next(clock.jumps_in_wait, 0.0)
                return found

            def modify(self, *arguments: Any) -> selectors.SelectorKey:
                """The last call of the pool before it waits again."""
                clock.seconds_ahead += next(clock.jumps_after_wait, 0.0)
                return super().modify(*arguments)

        return Selector()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ChangedClock:
    """Also makes the first attempt of a response its last one."""
    clock = ChangedClock()
    monkeypatch.setattr(pool_slots, "QueuedCall", partial(QueuedCall, has_failed=True))
    monkeypatch.setattr(process_pool, "time", SimpleNamespace(monotonic=clock.monotonic))
    selectors_there = SimpleNamespace(
        DefaultSelector=clock.selector, EVENT_READ=selectors.EVENT_READ, EVENT_WRITE=selectors.EVENT_WRITE
    )
    monkeypatch.setattr(process_pool, "selectors", selectors_there)
    return clock


@contextmanager
def waiting_reward(folder: Path, response: str = "waits") -> Iterator[Future[list[RewardOutcome]]]:
    """It sleeps: a reward that is about to sleep may wait for a core, and is given the time."""
    (folder / "waiting.py").write_text(REWARD)
    with ScorerPool(
        FunctionScorer("waiting:score", "here"),
        name="score",
        num_processes=1,
        timeout_seconds=300.0,
        log_folder=folder / "logs",
        environment=scorer_environment(os.environ, [], [folder]),
    ) as pool:
        scored = pool.submit([RewardRequest("p", response, None, {})])
        wait_until((folder / "begun").exists)
        [process_id] = pool.process_ids()
        wait_until(lambda: Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "S")
        yield scored


def test_a_suspended_machine_fails_no_response(tmp_path: Path, clock: ChangedClock) -> None:
    with waiting_reward(tmp_path) as scored:
        clock.jumps_in_wait, waits_then = iter([1000.0]), clock.num_waits
        wait_until(lambda: clock.num_waits > waits_then + 10)
        (tmp_path / "end").touch()
        [outcome] = scored.result(timeout=60)
    assert (outcome.status, outcome.score) == ("OK", 1.0)


@pytest.mark.parametrize(("where", "num_limits"), [("jumps_in_wait", 2), ("jumps_after_wait", 1)])
def test_a_slow_pool_ends_a_hanging_reward(tmp_path: Path, clock: ChangedClock, where: str, num_limits: int) -> None:
    """Its thread gets a core every twenty seconds. During a wait that looks like a suspended machine."""
    began = clock.monotonic()
    with waiting_reward(tmp_path, "hangs") as scored:
        ended = ends(scored, clock)
        setattr(clock, where, itertools.repeat(20.0))
        [outcome] = scored.result(timeout=60)
        setattr(clock, where, iter(()))
    assert outcome.status == "TIMEOUT"
    [(seconds_ahead, now)] = ended
    assert now - began > num_limits * 300
    # Without the real waiting time, which is as long as the test takes on this machine.
    assert seconds_ahead < num_limits * 300 + 150


@pytest.mark.parametrize("is_waiting", [False, True])
def test_sleep_of_a_process_is_not_counted_as_waiting_for_a_core(
    tmp_path: Path, clock: ChangedClock, monkeypatch: pytest.MonkeyPatch, is_waiting: bool
) -> None:
    """A reward that looks again and again whether something has happened has just woken up each time that the pool
    looks at it; another one waits for a core for three limits, and then sleeps."""
    looks = itertools.count(1)

    def core_use(_: ScoringChild) -> CoreUse:
        look = next(looks)
        if not is_waiting:
            return CoreUse(look / 1000, 0.0, is_runnable=True)
        return CoreUse(1.0, 0.0, is_runnable=True) if clock.seconds_ahead < 900 else CoreUse(1.1, 900.0, False)

    with waiting_reward(tmp_path, "hangs") as scored:
        ended = ends(scored, clock)
        monkeypatch.setattr(ScoringChild, "core_use", core_use)
        clock.jumps_after_wait = itertools.repeat(20.0)
        [outcome] = scored.result(timeout=60)
        clock.jumps_after_wait = iter(())
    assert outcome.status == "TIMEOUT"
    [(seconds_ahead, _)] = ended
    num_limits = 4 if is_waiting else 1
    assert num_limits * 300 - 60 < seconds_ahead < num_limits * 300 + 150


def ends(scored: Future[list[RewardOutcome]], clock: ChangedClock) -> list[tuple[float, float]]:
    """When it has ended, by the pool's thread: how far the clock was ahead, and what it showed."""
    ended: list[tuple[float, float]] = []
    scored.add_done_callback(lambda _: ended.append((clock.seconds_ahead, clock.monotonic())))
    return ended


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


def test_the_time_limit_does_not_count_core_time_of_other_processes(tmp_path: Path) -> None:
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


def test_the_limit_of_the_pool_leaves_code_time_to_wait_for_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(
        "rljob_trainer.workers.reward.ScorerPool", lambda *_, timeout_seconds, **__: limits.append(timeout_seconds)
    )
    reward = Reward(name="score", type=RewardType.CODE, code=CodeReward(), timeout_seconds=30.0)
    settings = RewardSettings((), (), 8, tmp_path, {})
    for scorer in (scorer_spec(reward, "rewards[0]", None), FormatScorer(".*", "")):
        assert scorer is not None
        settings.start_pool(ScorerSettings(reward, "", scorer, 1), 1, 0)
    assert limits == [360.0, 30.0]
