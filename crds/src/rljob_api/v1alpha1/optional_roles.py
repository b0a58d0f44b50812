"""The roles that only some jobs have: the reference model, the critic and the reward model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rljob_api.rule import rule
from rljob_api.v1alpha1.recipes import (
    is_distillation,
    is_distillation_cel,
    may_need_critic,
    may_need_critic_cel,
)
from rljob_api.v1alpha1.reward import RewardType
from rljob_api.v1alpha1.spec import RLJobSpec, pool_of_cel
from rljob_api.v1alpha1.training import Training

_ALGORITHM = "self.training.algorithm"


def may_need_reference(spec: RLJobSpec) -> bool:
    """Whether the job has a KL term or learns from a teacher, or a user-defined function may need the reference's
    log-probabilities."""
    algorithm = spec.training.algorithm
    has_function = algorithm.advantage.function is not None or algorithm.loss.function is not None
    return algorithm.kl.coefficient > 0 or has_function or is_distillation(algorithm)


MAY_NEED_REFERENCE_CEL = (
    f"{_ALGORITHM}.kl.coefficient > 0.0 || has({_ALGORITHM}.advantage.function) || has({_ALGORITHM}.loss.function)"
    f" || {is_distillation_cel(_ALGORITHM)}"
)


def reference_is_the_actor(spec: RLJobSpec) -> bool:
    """Whether the reference, if the job has one, is the actor's model with its adapters disabled."""
    pools, ref = spec.placed_roles(), spec.roles.ref
    has_actor_layout = pools["ref"] == pools["actor"] and ref.shard_size is None and ref.sequence_parallel is None
    return spec.training.model.lora is not None and has_actor_layout and ref.model is None


REFERENCE_IS_THE_ACTOR_CEL = (
    f"has(self.training.model.lora) && {pool_of_cel('ref')} == {pool_of_cel('actor')}"
    " && !has(self.roles.ref.shardSize) && !has(self.roles.ref.sequenceParallel) && !has(self.roles.ref.model)"
)


def has_reward_model(training: Training) -> bool:
    """Whether one of the rewards is a reward model."""
    return any(reward.type is RewardType.REWARD_MODEL for reward in training.rewards)


def has_reward_model_cel(training: str) -> str:
    """CEL for `has_reward_model`."""
    return f"{training}.rewards.exists(reward, reward.type == 'RewardModel')"


@dataclass(frozen=True)
class OptionalRole:
    """A role that only some jobs have."""

    name: str
    is_present: Callable[[RLJobSpec], bool]
    is_present_cel: str
    wrong: str
    """Why a job does not have the role, for messages."""
    advice: str
    """How to get the role, for messages."""


OPTIONAL_ROLES = (
    OptionalRole(
        "ref",
        may_need_reference,
        MAY_NEED_REFERENCE_CEL,
        "the job has no reference model (training.algorithm.kl.coefficient is 0)",
        "set the coefficient above 0 (or use Distillation, or a function that needs ref_logprobs)",
    ),
    OptionalRole(
        "critic",
        lambda spec: may_need_critic(spec.training.algorithm),
        may_need_critic_cel("self.training.algorithm"),
        "the job's algorithm has no critic",
        "choose an advantage that needs a critic (algorithm.type: PPO)",
    ),
    OptionalRole(
        "rewardModel",
        lambda spec: has_reward_model(spec.training),
        has_reward_model_cel("self.training"),
        "the job has no reward of type RewardModel",
        "add such a reward to training.rewards",
    ),
)


def absent_roles(spec: RLJobSpec) -> list[str]:
    """Names of the optional roles that this job does not have."""
    return [role.name for role in OPTIONAL_ROLES if not role.is_present(spec)]


TEACHER_RULES = (
    rule(
        RLJobSpec,
        "RLJobSpec.teacher",
        field=".roles.ref.model",
        cel=f"has(self.roles.ref.model) || !{is_distillation_cel(_ALGORITHM)}",
        wrong="is required with advantage Distillation",
        advice="set source to the teacher, a model with the policy's tokenizer",
        holds=lambda spec: spec.roles.ref.model is not None or not is_distillation(spec.training.algorithm),
    ),
)

CRITIC_RULES = (
    rule(
        Training,
        "Training.critic",
        field=".critic",
        cel=f"!has(self.critic) || {may_need_critic_cel('self.algorithm')}",
        wrong="would be ignored, because the job's algorithm has no critic",
        advice="remove the block, or choose algorithm.type: PPO or advantage.type: GAE",
        holds=lambda training: training.critic is None or may_need_critic(training.algorithm),
    ),
    rule(
        Training,
        "Training.criticWarmupSteps",
        field=".critic.warmupSteps",
        cel="!has(self.critic) || self.critic.warmupSteps < self.steps",
        wrong="must be below training.steps, or the policy is never trained",
        advice="reduce warmupSteps, or increase training.steps",
        holds=lambda training: training.critic is None or training.critic.warmup_steps < training.steps,
    ),
    rule(
        Training,
        "Training.criticOptimizerWarmupSteps",
        field=".critic.optimizer.warmupSteps",
        cel="!has(self.critic) || self.critic.optimizer.warmupSteps <= self.steps",
        wrong="must be at most training.steps",
        advice="reduce it, or increase training.steps",
        holds=lambda training: training.critic is None or training.critic.optimizer.warmup_steps <= training.steps,
    ),
)
