"""Rollouts of agents that use OpenAI's client in processes of their own: rewards, limits, and failures."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_testing.environments import probe
from rljob_testing.messages import Mentions
from rljob_testing.sessions import LIMITS, endpoint
from rljob_trainer.engines.rollout.base import Outcome, SamplingSettings
from rljob_trainer.environments.agent_rollouts import AgentEpisode
from rljob_trainer.environments.description import ClassSpec
from rljob_trainer.environments.environment_pool import EnvironmentProcesses
from rljob_trainer.environments.episode import EpisodeRequest, FinishedEpisode
from rljob_trainer.environments.settings import EpisodeLimits
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.base import RewardStatus
from rljob_trainer.rewards.scorer_environment import scorer_environment

CODE = """
import asyncio, os, random, time
from pathlib import Path
from openai import AsyncOpenAI, OpenAI


async def run(session, row, word="one"):
    kind = row.get("kind", "")
    if kind == "dies":
        os._exit(3)
    if kind == "dies once" and not Path(row["file"]).exists():
        Path(row["file"]).touch()
        os._exit(3)
    if kind == "does nothing":
        return 1.0
    if kind in ("never waits", "never waits and raises"):
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=0.2, max_retries=0)
        try:
            await client.chat.completions.create(model=session.model, messages=[{"role": "user", "content": "slow"}])
        except Exception:
            pass
        if kind == "never waits and raises":
            raise ValueError("a typo")
        return 1.0
    if kind == "does not await":
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        asyncio.create_task(
            client.chat.completions.create(model=session.model, messages=[{"role": "user", "content": "slow"}])
        )
        await asyncio.sleep(0.5)
        return 1.0
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages = []
        for _ in range(row.get("turns", 2)):
            messages.append({"role": "user", "content": word})
            answer = await client.chat.completions.create(model=session.model, messages=messages)
            messages.append(answer.choices[0].message)
        if kind == "raises":
            raise ValueError("a typo")
        if kind == "loses a service":
            raise ConnectionError("the search engine is away")
        if kind == "hangs":
            await asyncio.sleep(600)
        if kind == "gives up":
            await client.with_options(timeout=0.2, max_retries=0).chat.completions.create(
                model=session.model, messages=[{"role": "user", "content": "slow"}])
        if kind == "none":
            return None
        return {"seed": session.seed, "random": random.random(), "seconds": session.deadline - time.time()}


def sync(session, row, **arguments):
    client = OpenAI(base_url=session.base_url, api_key=session.api_key)
    text = ""
    for chunk in client.chat.completions.create(
        model=session.model, messages=[{"role": "user", "content": "one"}], stream=True
    ):
        text += chunk.choices[0].delta.content or ""
    return float(text == "an answer")


def needs_more(session):
    return 0.0


class Agent:
    pass
"""


def spec(name: str, **arguments: object) -> ClassSpec:
    return ClassSpec("session", f"games:{name}", arguments, "spec.training.environment.session", is_agent=True)


async def write(prompt: str) -> str:
    if "slow" in prompt:
        await asyncio.sleep(600)
    return "an answer"


def rollout(
    folder: Path,
    row: Mapping[str, object],
    limits: EpisodeLimits = LIMITS,
    name: str = "run",
    *,
    word: str = "one",
    run_seconds: float = 60.0,
    max_new_tokens: int = 3000,
) -> FinishedEpisode:
    """One rollout of an agent in a process of its own."""
    (folder / "games.py").write_text(CODE)

    async def episode() -> FinishedEpisode:
        async with endpoint(folder / "model", write) as made:
            processes = EnvironmentProcesses(
                [spec(name, word=word)],
                log_folder=folder / "logs",
                variables=scorer_environment(os.environ, [], [folder]),
                timeout_seconds=60.0,
                rollouts_per_process=1,
                max_rollouts=1,
                run_seconds=run_seconds,
            )
            request = EpisodeRequest(5, None, row, SamplingSettings(1.0, 1.0, 0, max_new_tokens, ()), 11, 12)
            try:
                return await AgentEpisode(
                    request,
                    limits,
                    made.templates,
                    processes,
                    made.policy,
                    made.server,
                    name="session",
                    needs_reward=True,
                    starts_new_rows=False,
                ).run()
            finally:
                await processes.close()

    return asyncio.run(asyncio.wait_for(episode(), 120))


@pytest.mark.parametrize("name", ["run", "sync"])
def test_a_rollout_of_an_agent(tmp_path: Path, name: str) -> None:
    found = rollout(tmp_path, {}, name=name)
    assert (found.number, found.outcome, found.reward.status) == (5, Outcome.COMPLETED, RewardStatus.OK)
    assert found.transcript is not None
    assert (len(found.transcript.rows), found.transcript.num_turns) == (1, 2 if name == "run" else 1)
    if name == "sync":
        assert found.reward.value == 1.0
        return
    assert isinstance(found.reward.value, Mapping)
    assert found.reward.value["seed"] == 12
    assert 0 < found.reward.value["seconds"] <= 60


@pytest.mark.parametrize(
    ("row", "outcome", "status", "detail", "num_turns"),
    [
        ({"kind": "raises"}, Outcome.ERROR, RewardStatus.ERROR, "a typo", 2),
        ({"kind": "none"}, Outcome.ERROR, RewardStatus.ERROR, "returned None", 2),
        ({"turns": 4}, Outcome.MAX_TURNS, RewardStatus.TIMEOUT, "environment.maxTurns", 3),
        ({"kind": "gives up"}, Outcome.TIME_LIMIT, RewardStatus.TIMEOUT, "APITimeoutError", 2),
        ({"kind": "loses a service"}, Outcome.INFRASTRUCTURE, RewardStatus.OK, "", None),
        ({"kind": "dies"}, Outcome.INFRASTRUCTURE, RewardStatus.OK, "", None),
        ({"kind": "does nothing"}, Outcome.INFRASTRUCTURE, RewardStatus.ERROR, "without a turn of the policy", None),
        ({"kind": "does not await"}, Outcome.INFRASTRUCTURE, RewardStatus.ERROR, "wait for the answers", None),
        ({"kind": "never waits"}, Outcome.INFRASTRUCTURE, RewardStatus.OK, "", None),
        ({"kind": "never waits and raises"}, Outcome.INFRASTRUCTURE, RewardStatus.ERROR, "a typo", None),
    ],
)
def test_ends(
    tmp_path: Path, row: dict[str, object], outcome: Outcome, status: RewardStatus, detail: str, num_turns: int | None
) -> None:
    found = rollout(tmp_path, row, replace(LIMITS, max_turns=3))
    assert (found.outcome, found.reward.status, found.reward.value) == (outcome, status, None)
    assert detail in found.reward.detail
    assert (found.transcript.num_turns if found.transcript else None) == num_turns


@pytest.mark.parametrize("limit", ["of the agent's client", "maxSeconds"])
def test_a_rollout_without_a_turn_in_time_begins_again(
    tmp_path: Path, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The score of such an agent does not depend on the policy."""
    row = {"kind": "never waits"} if limit != "maxSeconds" else {}
    limits = replace(LIMITS, retries=1, max_seconds=0.5 if limit == "maxSeconds" else 60.0)
    found = rollout(tmp_path, row, limits, word="slow")
    assert (found.outcome, found.transcript) == (Outcome.INFRASTRUCTURE, None)
    assert "attempt 2 of 2 failed: the agent has got no turn of the policy in time" in caplog.text


def test_an_agent_that_hangs_is_killed(tmp_path: Path) -> None:
    found = rollout(tmp_path, {"kind": "hangs"}, run_seconds=3.0)
    assert (found.outcome, found.reward.status) == (Outcome.TIME_LIMIT, RewardStatus.TIMEOUT)
    assert "the agent's function took longer than 3 s" in found.reward.detail


def test_a_rollout_whose_process_dies_begins_again(tmp_path: Path) -> None:
    row = {"kind": "dies once", "file": str(tmp_path / "died")}
    found = rollout(tmp_path, row, replace(LIMITS, retries=1))
    assert (found.outcome, found.reward.status) == (Outcome.COMPLETED, RewardStatus.OK)


@pytest.mark.parametrize(
    ("agent", "mentions"),
    [
        (spec("missing"), Mentions("session.path", "has no 'missing'")),
        (spec("Agent"), Mentions("session.path", "is a type; name a function")),
        (spec("needs_more"), Mentions("session.path", "cannot be called", "def run(session, row)")),
        (spec("run", speed=2), Mentions("session.path", "speed", "cannot be called")),
    ],
)
def test_functions_that_cannot_be_used(tmp_path: Path, agent: ClassSpec, mentions: Mentions) -> None:
    (tmp_path / "games.py").write_text(CODE)
    with pytest.raises(ConfigurationError) as error:
        probe(tmp_path, agent)
    assert str(error.value) == mentions


def test_functions_are_described_and_not_called(tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text(CODE)
    assert [probe(tmp_path, spec(name)).descriptions[0].is_async for name in ("run", "sync")] == [True, False]
