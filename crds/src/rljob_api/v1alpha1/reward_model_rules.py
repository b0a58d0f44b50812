"""Rules on the reward model: one of the rewards, and its place."""

from __future__ import annotations

import re

from rljob_api.v1alpha1.reward import RewardModel, RewardType
from rljob_api.v1alpha1.rule import cel_text, rule
from rljob_api.v1alpha1.training import Training
from rljob_api.v1alpha1.training_rules import LOCAL_SOURCE


def has_reward_model(training: Training) -> bool:
    """Whether a model is among the rewards."""
    return any(reward.type is RewardType.REWARD_MODEL for reward in training.rewards)


def has_reward_model_cel(training: str) -> str:
    """The same in CEL."""
    return f"{training}.rewards.exists(reward, reward.type == 'RewardModel')"


REWARD_MODEL_RULES = (
    rule(
        Training,
        "Training.oneRewardModel",
        field=".rewards",
        cel="self.rewards.filter(reward, reward.type == 'RewardModel').size() <= 1",
        wrong="there are several of type RewardModel, and one role for them",
        advice="keep one of them",
        holds=lambda training: sum(reward.type is RewardType.REWARD_MODEL for reward in training.rewards) <= 1,
    ),
    rule(
        RewardModel,
        "RewardModel.revision",
        field=".revision",
        cel=f"!has(self.revision) || !self.source.matches({cel_text(LOCAL_SOURCE)})",
        wrong="a revision means nothing for a local model",
        advice="remove it",
        holds=lambda model: model.revision is None or re.search(LOCAL_SOURCE, model.source) is None,
    ),
)
