"""Scoring processes that are killed, and what is accepted as a score: neither makes an innocent response fail."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rljob_api.v1alpha1.reward import ErrorPolicy, FunctionReward, Reward, RewardType
from rljob_trainer.errors import ResourceError, RewardError
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest, RewardStatus
from rljob_trainer.rewards.error_policies import apply_error_policies
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.process_pool import ScorerPool
from rljob_trainer.rewards.scorer_environment import scorer_environment

WHERE = "spec.training.rewards[0]"
USER_CODE = """
import os, signal, time
from pathlib import Path

FOLDER = Path(__file__).parent

def score(prompt, response, answer, row):
    with (FOLDER / "begun").open("a") as begun:
        begun.write(response + "\\n")
    num_begun = (FOLDER / "begun").read_text().splitlines().count(response)
    verb, _, value = response.partition(" ")
    if verb == "waits":
        while not (FOLDER / "end").exists():
            time.sleep(0.01)
    if verb == "dies" or verb == "dies_once" and num_begun == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if verb == "exits_then" and num_begun >= 2:
        os._exit(7)
    if verb == "exits_then":
        os.kill(os.getpid(), signal.SIGKILL)
    if verb == "closes":
        os.closerange(3, 10_000)
        time.sleep(600)
    if verb == "forges":
        for descriptor in range(3, 10_000):
            try:
                os.write(descriptor, value.encode() + b"\\n")
            except OSError:
                pass
        return 0.0
    return float(value or 1)
"""
RESULT = '["OK", 1.0, "", 0.1, null]'
FORGED = [RESULT, f'["", {RESULT}]', '{"ready": true}', '{"refused": "x"}', "[" * 5000]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "odd_rewards.py").write_text(USER_CODE)
    return tmp_path


@contextmanager
def pool_in(folder: Path, *, num_processes: int = 1, path: str = "odd_rewards:score") -> Iterator[ScorerPool]:
    with ScorerPool(
        FunctionScorer(path, WHERE),
        name="score",
        num_processes=num_processes,
        timeout_seconds=60.0,
        log_folder=folder / "logs",
        environment=scorer_environment(os.environ, [], [folder]),
    ) as pool:
        yield pool


def requests(*responses: str) -> list[RewardRequest]:
    return [RewardRequest("p", response, None, {}) for response in responses]


def run(pool: ScorerPool, *responses: str) -> list[RewardOutcome]:
    return pool.submit(requests(*responses)).result(timeout=60)


def begun(folder: Path) -> list[str]:
    path = folder / "begun"
    return path.read_text().splitlines() if path.exists() else []


def test_a_process_killed_from_outside_fails_no_response(folder: Path) -> None:
    with pool_in(folder) as pool:
        scored = pool.submit(requests("number 1", "waits 2", "number 3", "number 4"))
        give_up_at = time.monotonic() + 60
        while "waits 2" not in begun(folder):
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        os.kill(pool.process_ids()[0], signal.SIGKILL)
        (folder / "end").touch()
        outcomes = scored.result(timeout=60)
    assert [(outcome.status, outcome.score) for outcome in outcomes] == [("OK", 1), ("OK", 2), ("OK", 3), ("OK", 4)]
    assert begun(folder).count("waits 2") == 2


def test_processes_killed_twice_at_a_response_are_distinguished_from_a_failing_reward(folder: Path) -> None:
    """Exit codes, other signals and a connection that the reward closes are failures of the reward."""
    with pool_in(folder, num_processes=2) as pool:
        outcomes = run(pool, "dies", "number 2", "dies_once 3", "closes", "exits_then", "number 4")
    assert [outcome.score for outcome in outcomes] == [None, 2.0, 3.0, None, None, 4.0]
    assert [outcome.status for outcome in outcomes] == ["KILLED", "OK", "OK", "DIED", "DIED", "OK"]
    assert "ended its process (signal SIGKILL)" in outcomes[0].detail
    assert outcomes[3].detail.startswith("closed the connection")
    assert "ended its process (exit code 7)" in outcomes[4].detail
    assert sorted(each for each in begun(folder) if "number" not in each) == [
        *("closes", "closes", "dies", "dies", "dies_once 3", "dies_once 3", *["exits_then"] * 3),
    ]


@pytest.mark.parametrize("policy", list(ErrorPolicy))
def test_a_kill_never_becomes_a_score(policy: ErrorPolicy) -> None:
    reward = Reward(type=RewardType.FUNCTION, function=FunctionReward(path="f:f"), on_error=policy, on_timeout=policy)
    outcomes = [
        RewardOutcome(None, RewardStatus.ERROR, "raised ValueError", 0.1),
        RewardOutcome(None, RewardStatus.TIMEOUT, "ran longer than 1 s and was killed", 1.0),
        RewardOutcome(None, RewardStatus.KILLED, "ended its process (SIGKILL)", 0.0),
    ]
    with pytest.raises(ResourceError) as caught:
        apply_error_policies(reward, WHERE, "f:f", requests("a", "b", "large"), outcomes)
    lines = str(caught.value).splitlines()
    assert lines[0] == "spec.training.rewards[0] (reward score): f:f ended its process (SIGKILL)"
    assert "  response: 'large'" in lines
    assert "out of memory" in lines[-1]
    assert "numProcesses" in lines[-1]


def test_a_judge_excludes_what_it_cannot_score_and_a_measured_reward_ends_no_run() -> None:
    outcomes = [RewardOutcome(None, RewardStatus.ERROR, "gave a reply that cannot be read", 0.1)]
    judge = {"url": "http://judge/v1", "model": "m", "rubric": "{response}", "pattern": "(.)"}
    blocks = {"Judge": {"judge": judge}, "Remote": {"remote": {"url": "http://server"}}, "MathAnswer": {}}

    def score(kind: str, **fields: object) -> float:
        reward = Reward.from_wire({"type": kind, **blocks[kind], **fields})
        [found] = apply_error_policies(reward, WHERE, "it", requests("a"), outcomes)
        return found

    assert math.isnan(score("Judge"))
    assert math.isnan(score("Remote"))
    assert math.isnan(score("MathAnswer", weight=0))
    assert math.isnan(score("Judge", weight=0, onError="Fail"))
    assert score("Judge", onError="Score", errorScore=-1) == -1
    for kind, fields in (("MathAnswer", {}), ("Judge", {"onError": "Fail"})):
        with pytest.raises(RewardError, match=r"set spec\.training\.rewards\[0\]\.onError: Exclude"):
            score(kind, **fields)


def test_a_process_killed_while_loading_is_no_configuration_error(folder: Path) -> None:
    (folder / "large_rewards.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pool_in(folder, path="large_rewards:score") as pool, pytest.raises(ResourceError, match="out of memory"):
        pool.wait_until_ready()


@pytest.mark.parametrize("forged", FORGED)
def test_output_of_a_reward_is_not_taken_for_a_score(folder: Path, forged: str) -> None:
    with pool_in(folder) as pool:
        outcomes = run(pool, "number 2", f"forges {forged}", "number 3", "number 4")
        later = run(pool, "number 5")
    assert [outcome.score for outcome in outcomes + later] == [2.0, None, 3.0, 4.0, 5.0]
    assert [outcome.status for outcome in outcomes] == ["OK", "DIED", "OK", "OK"]
    assert outcomes[1].detail.startswith("wrote into the connection")


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def circular() -> object:
    value: list[object] = []
    value.append(value)
    return value


@pytest.mark.parametrize("value", [nested(5000), circular(), 10**5000], ids=["deep", "circular", "digits"])
def test_a_row_that_json_cannot_represent_is_rejected_by_name(folder: Path, value: object) -> None:
    with pool_in(folder) as pool:
        with pytest.raises(RewardError, match=r"a dataset row cannot be sent to the reward: .*; use only strings"):
            pool.submit([RewardRequest("p", "number 1", None, {"odd": value})])
        assert run(pool, "number 1")[0].score == 1.0
