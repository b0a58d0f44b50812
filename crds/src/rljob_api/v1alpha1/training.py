"""What is trained and how. This is the trainer's whole configuration; there is no second configuration language."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.rule import Path, rule, unique_rule
from rljob_api.scalars import Count, PositiveCount
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.dataset import Dataset, DatasetType, Evaluation
from rljob_api.v1alpha1.model import Critic, LoraSync, Model
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_api.v1alpha1.reward import Reward, RewardType
from rljob_api.v1alpha1.rollout import Rollout, RolloutEngine

_NEEDS_GYM = "self.rewards.exists(reward, reward.type == 'ReasoningGym')"


class Logger(StrEnum):
    """Sinks for metrics. JSON Lines are always written."""

    CONSOLE = "Console"
    TENSORBOARD = "TensorBoard"


class Training(WireModel):
    """One reinforcement-learning run."""

    model: Model
    dataset: Dataset
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1, max_length=16)]
    """What a response is worth: the sum of weight x score."""
    algorithm: Algorithm = Field(default_factory=Algorithm)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    critic: Critic | None = None
    """Only for an algorithm with a critic, which has one with every default when this is unset."""
    rollout: Rollout = Field(default_factory=Rollout)
    evaluation: Evaluation | None = None
    loggers: Annotated[tuple[Logger, ...], Field(max_length=8)] = (Logger.CONSOLE, Logger.TENSORBOARD)
    steps: PositiveCount
    """Training steps in all; a resumed run does the rest of them."""
    batch_size: PositiveCount = 64
    """Prompts per step, over all workers; batchSize x rollout.groupSize responses are trained on, an equal number by
    every GPU of the pool (by every group of roles.actor.sequenceParallel of them)."""
    mini_batch_size: PositiveCount | None = None
    """Prompts per optimizer update, over all workers; batchSize when unset (strictly on-policy)."""
    num_epochs_per_batch: PositiveCount = 1
    """Passes over each batch."""
    max_tokens_per_micro_batch: PositiveCount = 16384
    """Tokens in one forward and backward pass of one worker; padding counts only for a model that needs its rows
    padded. Workers that share rows (sequenceParallel) pass so many times as many together. A memory limit: results do
    not depend on it."""
    seed: Count = 0
    timeline_steps: Annotated[tuple[PositiveCount, ...], Field(max_length=16)] = ()
    """Steps (from 1) of which a timeline is written: the controller's phases and what every worker process did, in
    timelines/ of the run folder, for Perfetto or chrome://tracing. The first step is rarely like the others."""


def _engine_takes_adapters(training: Training) -> bool:
    lora = training.model.lora
    wants_adapter = lora is not None and lora.sync is LoraSync.ADAPTER
    return not wants_adapter or training.rollout.engine is not RolloutEngine.HUGGING_FACE


def _needs_gym(training: Training) -> bool:
    return any(reward.type is RewardType.REASONING_GYM for reward in training.rewards)


def _gym_evaluates_gym(training: Training) -> bool:
    evaluation = training.evaluation
    return not _needs_gym(training) or evaluation is None or evaluation.dataset.type is DatasetType.REASONING_GYM


def _too_long_buffers(training: Training) -> list[Path]:
    """Below `rewards`."""
    limit = training.rollout.max_new_tokens
    return [
        (index, "overlong", "bufferTokens")
        for index, reward in enumerate(training.rewards)
        if reward.overlong is not None and reward.overlong.buffer_tokens > limit
    ]


TRAINING_RULES = (
    rule(
        Training,
        "Training.warmupSteps",
        field=".optimizer.warmupSteps",
        cel="self.optimizer.warmupSteps <= self.steps - (has(self.critic) ? self.critic.warmupSteps : 0)",
        wrong="must not be more than training.steps, less critic.warmupSteps where there are any",
        advice="lower it, or train for more steps",
        holds=lambda t: t.optimizer.warmup_steps <= t.steps - (t.critic.warmup_steps if t.critic else 0),
    ),
    rule(
        Training,
        "Training.timelineSteps",
        field=".timelineSteps",
        cel="self.timelineSteps.all(step, step <= self.steps)",
        wrong="must not be more than training.steps",
        advice="name steps that are done (the first is 1)",
        holds=lambda t: all(step <= t.steps for step in t.timeline_steps),
    ),
    rule(
        Training,
        "Training.loraSync",
        field=".model.lora.sync",
        cel="!has(self.model.lora) || self.model.lora.sync != 'Adapter' || self.rollout.engine != 'HuggingFace'",
        wrong="the HuggingFace engine takes no adapters",
        advice="write Merged or Auto, or rollout.engine: VLLM",
        holds=_engine_takes_adapters,
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
    rule(
        Training,
        "Training.oneRewardModel",
        field=".rewards",
        cel="self.rewards.filter(reward, reward.type == 'RewardModel').size() <= 1",
        wrong="there are several of type RewardModel, and one role for them",
        advice="keep one of them",
        holds=lambda training: sum(reward.type is RewardType.REWARD_MODEL for reward in training.rewards) <= 1,
    ),
)
