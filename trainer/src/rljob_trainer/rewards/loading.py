"""Maps an entry of the job's rewards to its scorer."""

from __future__ import annotations

from rljob_api.quantities import bytes_of
from rljob_api.v1alpha1.dataset import Dataset
from rljob_api.v1alpha1.reward import CodeReward, CodeScore, Reward, RewardType
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.base import ScorerSpec
from rljob_trainer.rewards.code import CodeScorer
from rljob_trainer.rewards.format import FormatScorer
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.reasoning_gym import ReasoningGymScorer


def scorer_spec(reward: Reward, where: str, dataset: Dataset | None) -> ScorerSpec | None:
    """The scorer of the reward at `where`, such as `spec.training.rewards[0]`; None for a reward that needs no scoring
    processes. The scorer is not loaded yet; the scoring processes load it and report errors.

    Raises ConfigurationError if the settings of the reward's type are missing, or if the dataset has no rows for it.
    """
    of_reward = f"(reward {reward.name})"
    match reward.type:
        case RewardType.FUNCTION:
            if reward.function is None:
                raise ConfigurationError(
                    f"{where}.function {of_reward}: missing for type Function; add `function: {{path: mine:score}}`"
                )
            return FunctionScorer(reward.function.path, f"{where}.function.path {of_reward}")
        case RewardType.MATH_ANSWER:
            return MathAnswerScorer(f"{where}.type {of_reward}")
        case RewardType.CODE:
            code = reward.code or CodeReward()
            return CodeScorer(
                f"{where}.type {of_reward}",
                is_fraction=code.score is CodeScore.FRACTION,
                max_tests=code.max_tests,
                test_seconds=code.test_timeout_seconds,
                response_seconds=reward.timeout_seconds,
                memory_bytes=bytes_of(code.memory),
            )
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
        case RewardType.OVERLONG | RewardType.REWARD_MODEL | RewardType.ENVIRONMENT:
            return None
