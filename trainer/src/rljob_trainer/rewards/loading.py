"""From the job's reward block to a scorer."""

from __future__ import annotations

from rljob_api.v1alpha1.dataset import Dataset
from rljob_api.v1alpha1.reward import Reward, RewardType
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.base import ScorerSpec
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.reasoning_gym import ReasoningGymScorer


def scorer_spec(reward: Reward, dataset: Dataset) -> ScorerSpec:
    """The scorer that the job asks for. Nothing is imported yet; the scoring processes do that and report.

    Raises ConfigurationError where the blocks do not fit together.
    """
    match reward.type:
        case RewardType.FUNCTION:
            if reward.function is None:
                raise ConfigurationError(
                    "spec.training.reward.function: missing for type Function; add `function: {path: module:function}`"
                )
            return FunctionScorer(reward.function.path)
        case RewardType.MATH_ANSWER:
            return MathAnswerScorer()
        case RewardType.REASONING_GYM:
            if dataset.reasoning_gym is None:
                raise ConfigurationError(
                    f"spec.training.reward.type: ReasoningGym scores only rows of a ReasoningGym dataset (dataset.type "
                    f"is {dataset.type}); use such a dataset, or another reward"
                )
            return ReasoningGymScorer(dataset.reasoning_gym.task, dict(dataset.reasoning_gym.config))
