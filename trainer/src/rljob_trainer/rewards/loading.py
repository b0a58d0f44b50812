"""Maps an entry of the job's rewards to its scorer, and to the settings of its calls.

Limits of a reward, such as the number of calls at the same time, are divided equally among its scoring processes, and
rounded down.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from rljob_api.quantities import bytes_of
from rljob_api.rule import LOCAL_SOURCE
from rljob_api.v1alpha1.dataset import Dataset
from rljob_api.v1alpha1.reward import CodeReward, CodeScore, JudgeReward, RemoteReward, Reward, RewardType
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.base import CallSettings, ScorerSpec, Takes
from rljob_trainer.rewards.code import CodeScorer
from rljob_trainer.rewards.format import FormatScorer
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.reasoning_gym import ReasoningGymScorer
from rljob_trainer.rewards.services.scorers import JudgeScorer, RemoteScorer
from rljob_trainer.source_paths import local_path

MAX_CALLS = 64
"""Calls of an `async def` function at the same time, if the job does not set maxConcurrency."""
REMOTE_CALLS = 4
"""Requests of one process to a reward server at the same time."""
NO_NETRC = {"NETRC": os.devnull}
"""aiohttp would send passwords of a .netrc file beside the key."""


def scorer_spec(
    reward: Reward, where: str, dataset: Dataset | None, num_processes: int = 1, job_folder: Path = Path()
) -> ScorerSpec | None:
    """The scorer of the reward at `where`, such as `spec.training.rewards[0]`; None for a reward that needs no scoring
    processes. The scorer is not loaded yet; the scoring processes load it and report errors.

    `num_processes`: all scoring processes of this reward. `job_folder`: where relative paths of the job begin. Raises
    ConfigurationError if the settings of the reward's type are missing or wrong, or if the dataset has no rows for it.
    """
    of_reward = f"(reward {reward.name})"
    match reward.type:
        case RewardType.FUNCTION:
            if reward.function is None:
                raise ConfigurationError(
                    f"{where}.function {of_reward}: missing for type Function; add `function: {{path: mine:score}}`"
                )
            needs_async = reward.function.max_concurrency is not None
            where = f"{where}.function.path {of_reward}"
            return FunctionScorer(reward.function.path, where, str(reward.function.takes), needs_async)
        case RewardType.MATH_ANSWER:
            return MathAnswerScorer(f"{where}.type {of_reward}")
        case RewardType.CODE:
            return _code(reward.code or CodeReward(), f"{where}.type {of_reward}", reward.timeout_seconds)
        case RewardType.REASONING_GYM:
            if dataset is None or dataset.reasoning_gym is None:
                seen = "there is no dataset" if dataset is None else f"dataset.type is {dataset.type}"
                raise ConfigurationError(
                    f"{where}.type {of_reward}: ReasoningGym scores only rows of a ReasoningGym dataset ({seen}); use "
                    "such a dataset, or another reward"
                )
            task = dataset.reasoning_gym
            return ReasoningGymScorer(task.task, dict(task.config), f"{where}.type {of_reward}")
        case RewardType.FORMAT:
            if reward.format is None:
                raise ConfigurationError(
                    f"{where}.format {of_reward}: missing for type Format; add `format: {{pattern: ...}}`"
                )
            return FormatScorer(reward.format.pattern, f"{where}.format.pattern {of_reward}")
        case RewardType.JUDGE:
            if reward.judge is None:
                raise ConfigurationError(
                    f"{where}.judge {of_reward}: missing for type Judge; add `judge: {{url: ...}}`"
                )
            return _judge(reward.judge, reward, f"{where}.judge", num_processes, job_folder)
        case RewardType.REMOTE:
            if reward.remote is None:
                raise ConfigurationError(
                    f"{where}.remote {of_reward}: missing for type Remote; add `remote: {{url: ...}}`"
                )
            remote, seconds = reward.remote, reward.timeout_seconds
            return RemoteScorer(f"{where}.remote {of_reward}", remote.url, remote.key_variable, seconds)
        case RewardType.OVERLONG | RewardType.REWARD_MODEL | RewardType.ENVIRONMENT:
            return None


def call_settings(reward: Reward, where: str, num_processes: int) -> CallSettings:
    """How the processes of this reward call its scorer. `num_processes`: all processes of the reward. Raises
    ConfigurationError if there are more processes than `maxConcurrency`."""
    if (function := reward.function) is not None:
        calls = _share(function.max_concurrency or max(MAX_CALLS, num_processes), f"{where}.function", num_processes)
        return CallSettings(Takes(str(function.takes)), function.batch_size, calls)
    if (judge := reward.judge) is not None:
        calls = _share(judge.max_concurrency, f"{where}.judge", num_processes)
        return CallSettings(max_calls=calls, retries_unreachable=False)
    if (remote := reward.remote) is not None:
        return CallSettings(Takes.BATCH, remote.batch_size, REMOTE_CALLS, retries_unreachable=False)
    return CallSettings()


def service_variables(reward: Reward, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that only the scoring processes of this reward get, such as the key of its service."""
    service = service_of(reward)
    if service is None:
        return {}
    name = service.key_variable
    return {**NO_NETRC, **({name: environment[name]} if name is not None and name in environment else {})}


def service_of(reward: Reward) -> JudgeReward | RemoteReward | None:
    """The settings of the HTTP service of a judge or a reward server; None for other rewards."""
    return reward.judge or reward.remote


def _code(code: CodeReward, where: str, response_seconds: float) -> CodeScorer:
    return CodeScorer(
        where,
        is_fraction=code.score is CodeScore.FRACTION,
        max_tests=code.max_tests,
        test_seconds=code.test_timeout_seconds,
        response_seconds=response_seconds,
        memory_bytes=bytes_of(code.memory),
    )


def _judge(judge: JudgeReward, reward: Reward, where: str, num_processes: int, job_folder: Path) -> JudgeScorer:
    per_minute: list[int | None] = []
    for name, limit in (("requestsPerMinute", judge.requests_per_minute), ("tokensPerMinute", judge.tokens_per_minute)):
        per_minute.append(None if limit is None else _share(limit, where, num_processes, name))
    scale = judge.scale if judge.scale is not None or judge.labels else [0.0, 1.0]
    prompt_price, completion_price = judge.prices or (0.0, 0.0)
    return JudgeScorer(
        where=f"{where} (reward {reward.name})",
        url=judge.url,
        model=judge.model,
        key_variable=judge.key_variable,
        rubric=_rubric(judge.rubric, f"{where}.rubric", job_folder),
        pattern=judge.pattern,
        scale=None if scale is None else (scale[0], scale[1]),
        labels=judge.labels or {},
        request=judge.request,
        timeout_seconds=reward.timeout_seconds,
        requests_per_minute=per_minute[0],
        tokens_per_minute=per_minute[1],
        prompt_price=prompt_price,
        completion_price=completion_price,
    )


def _rubric(rubric: str, where: str, job_folder: Path) -> str:
    """The text of a rubric. Raises ConfigurationError if its file cannot be read or has no `{response}`."""
    if re.search(LOCAL_SOURCE, rubric) is None:
        return rubric
    try:
        text = local_path(rubric, job_folder, where).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{where}: {rubric!r} cannot be read as text: {error}") from error
    if "{response}" not in text:
        raise ConfigurationError(
            f"{where}: the file {rubric!r} does not contain {{response}}, where the response is inserted; add it"
        )
    return text


def _share(limit: int, where: str, num_processes: int, name: str = "maxConcurrency") -> int:
    if limit < num_processes:
        raise ConfigurationError(
            f"{where}.{name}: must be at least {num_processes}, because it is divided among the {num_processes} "
            f"scoring processes of this reward (seen: {limit}); increase it, or reduce numProcesses (each worker has "
            "at least one process)"
        )
    return limit // num_processes


def sees_group(reward: Reward) -> bool:
    """Whether the reward compares all responses to a prompt."""
    return reward.function is not None and str(reward.function.takes) == Takes.GROUP
