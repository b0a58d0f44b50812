"""Rules on the rewards of a job, one by one and together."""

from __future__ import annotations

from rljob_api.v1alpha1.dataset import DatasetType
from rljob_api.v1alpha1.reward import ErrorPolicy, Reward, RewardType
from rljob_api.v1alpha1.rule import Path, rule, union_rules, unique_rule
from rljob_api.v1alpha1.training import Training

WITHOUT_PROCESSES = (RewardType.OVERLONG, RewardType.REWARD_MODEL)
LIMITS = ("timeoutSeconds", "numProcesses", "onError", "onTimeout", "errorScore")
"""Fields that count for rewards in processes alone."""
_NEEDS_GYM = "self.rewards.exists(reward, reward.type == 'ReasoningGym')"


def _needs_gym(training: Training) -> bool:
    return any(reward.type is RewardType.REASONING_GYM for reward in training.rewards)


def _gym_evaluates_gym(training: Training) -> bool:
    evaluation = training.evaluation
    return not _needs_gym(training) or evaluation is None or evaluation.dataset.type is DatasetType.REASONING_GYM


def _has_no_limits(reward: Reward) -> bool:
    """Of what is ignored only another value than the default can be told: the API server fills in defaults."""
    return (
        reward.timeout_seconds == 10
        and reward.num_processes == 2
        and reward.on_error is ErrorPolicy.FAIL
        and reward.on_timeout is ErrorPolicy.SCORE
        and reward.error_score == 0
    )


def _too_long_buffers(training: Training) -> list[Path]:
    """Below `rewards`."""
    limit = training.rollout.max_new_tokens
    return [
        (index, "overlong", "bufferTokens")
        for index, reward in enumerate(training.rewards)
        if reward.overlong is not None and reward.overlong.buffer_tokens > limit
    ]


REWARD_RULES = (
    *union_rules(
        Reward,
        (
            ("Function", "function", lambda reward: (reward.type, reward.function)),
            ("Format", "format", lambda reward: (reward.type, reward.format)),
            ("Overlong", "overlong", lambda reward: (reward.type, reward.overlong)),
            ("RewardModel", "reward_model", lambda reward: (reward.type, reward.reward_model)),
        ),
    ),
    rule(
        Reward,
        "Reward.limits",
        field="",
        cel="!(self.type in ['Overlong', 'RewardModel']) || (self.timeoutSeconds == 10.0 && self.numProcesses == 2"
        " && self.onError == 'Fail' && self.onTimeout == 'Score' && self.errorScore == 0.0)",
        wrong="Overlong is computed from lengths and RewardModel on GPUs, not in processes: timeoutSeconds,"
        " numProcesses, onError, onTimeout and errorScore are ignored",
        advice="remove them",
        holds=lambda reward: reward.type not in WITHOUT_PROCESSES or _has_no_limits(reward),
    ),
    unique_rule(
        Training,
        "rewards",
        "name",
        lambda training: [reward.name for reward in training.rewards],
        "give each a name of its own (without one an entry is called score)",
    ),
    rule(
        Training,
        "Training.rewardWeights",
        field=".rewards",
        cel="self.rewards.exists(reward, reward.weight != 0.0)",
        wrong="all weights are 0, and nothing would be learned",
        advice="give at least one reward another weight",
        holds=lambda training: any(reward.weight != 0 for reward in training.rewards),
    ),
    rule(
        Training,
        "Training.overlongBuffer",
        field=".rewards",
        cel="self.rewards.all(reward, !has(reward.overlong)"
        " || reward.overlong.bufferTokens <= self.rollout.maxNewTokens)",
        wrong="overlong.bufferTokens must not be more than rollout.maxNewTokens",
        advice="lower it, or raise maxNewTokens",
        holds=lambda training: not _too_long_buffers(training),
        places=_too_long_buffers,
    ),
    rule(
        Training,
        "Training.reasoningGymReward",
        field=".rewards",
        cel=f"!{_NEEDS_GYM} || self.dataset.type == 'ReasoningGym'",
        wrong="the ReasoningGym reward needs a ReasoningGym dataset",
        advice="change the reward, or the type of training.dataset",
        holds=lambda t: not _needs_gym(t) or t.dataset.type is DatasetType.REASONING_GYM,
    ),
    rule(
        Training,
        "Training.reasoningGymEvaluation",
        field=".evaluation.dataset.type",
        cel=f"!{_NEEDS_GYM} || !has(self.evaluation) || self.evaluation.dataset.type == 'ReasoningGym'",
        wrong="the ReasoningGym reward also scores the evaluation and needs a ReasoningGym dataset there",
        advice="change the reward, or the type of this dataset",
        holds=_gym_evaluates_gym,
    ),
)
