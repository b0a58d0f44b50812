"""Rules on the sizes of batches, mini-batches and micro-batches, and on their distribution across GPUs."""

from __future__ import annotations

from collections.abc import Callable

from rljob_api.rule import Rule, rule
from rljob_api.v1alpha1.optional_roles import (
    MAY_NEED_REFERENCE_CEL,
    REFERENCE_IS_THE_ACTOR_CEL,
    has_reward_model,
    has_reward_model_cel,
    may_need_reference,
    reference_is_the_actor,
)
from rljob_api.v1alpha1.recipes import may_need_critic, may_need_critic_cel
from rljob_api.v1alpha1.spec import RLJobSpec, pool_of_cel, sequence_ranks_cel
from rljob_api.v1alpha1.training import Training


def _longest_sequence_fits(spec: RLJobSpec, role: str) -> bool:
    """Whether the GPUs that share a sequence of this role can hold the longest sequence in one micro-batch."""
    training = spec.training
    num_tokens = training.max_tokens_per_micro_batch * spec.roles.train_role(role).num_sequence_ranks
    return num_tokens >= training.max_sequence_tokens


def _longest_sequence_fits_cel(role: str) -> str:
    return (
        f"self.training.maxTokensPerMicroBatch * {sequence_ranks_cel(role)}"
        " >= (has(self.training.environment) ? self.training.environment.maxContextTokens"
        " : (has(self.training.dataset) ? self.training.dataset.maxPromptTokens"
        " : size(self.training.datasets) > 0 ? self.training.datasets.map(d, d.maxPromptTokens).max() : 0)"
        " + self.training.rollout.maxNewTokens)"
    )


def _splits_sequences_as_actor(spec: RLJobSpec, role: str) -> bool:
    """Whether the role splits sequences as the actor does. Then the actor's rule reports the same fault."""
    return spec.roles.train_role(role).num_sequence_ranks == spec.roles.actor.num_sequence_ranks


def _splits_sequences_as_actor_cel(role: str) -> str:
    return f"{sequence_ranks_cel(role)} == {sequence_ranks_cel('actor')}"


def _gets_batches_as_actor(spec: RLJobSpec, role: str) -> bool:
    """Whether batches are distributed across the role's GPUs as across the actor's. Then the actor's rule reports the
    same fault."""
    return spec.placed_roles()[role] == spec.placed_roles()["actor"] and _splits_sequences_as_actor(spec, role)


def _gets_batches_as_actor_cel(role: str) -> str:
    return f"({pool_of_cel(role)} == {pool_of_cel('actor')} && {_splits_sequences_as_actor_cel(role)})"


def _responses_are_divisible(spec: RLJobSpec, num_prompts: int | None, role: str = "actor") -> bool:
    """Whether the responses to `num_prompts` prompts can be distributed evenly across the role's GPUs, where GPUs that
    share sequences count as one. True if `num_prompts` is None."""
    name = spec.placed_roles()[role]
    product = (num_prompts or 0) * spec.training.rollout.group_size * spec.roles.train_role(role).num_sequence_ranks
    return all(product % (p.nodes * p.gpus_per_node) == 0 for p in spec.pools if p.name == name)


def _division(spec: RLJobSpec, num_prompts: int | None, role: str = "actor") -> list[str]:
    """The numbers of the job that are not divisible, for a message: `here 32 x 16 x 1 = 512` and
    `pool main: 3 x 1 = 3 GPUs`."""
    group_size, num_ranks = spec.training.rollout.group_size, spec.roles.train_role(role).num_sequence_ranks
    product = (num_prompts or 0) * group_size * num_ranks
    name = spec.placed_roles()[role]
    return [
        f"here {num_prompts} x {group_size} x {num_ranks} = {product}",
        *(
            f"pool {pool.name}: {pool.nodes} x {pool.gpus_per_node} = {pool.nodes * pool.gpus_per_node} GPUs"
            for pool in spec.pools
            if pool.name == name
        ),
    ]


def _responses_are_divisible_cel(field: str, role: str = "actor") -> str:
    return (
        f"self.pools.all(p, p.name != {pool_of_cel(role)}"
        f" || {field} * self.training.rollout.groupSize * {sequence_ranks_cel(role)}"
        " % (p.nodes * p.gpusPerNode) == 0)"
    )


def _longest_sequence_rule(role: str, is_present: Callable[[Training], bool], is_present_cel: str) -> Rule:
    """The rule that a micro-batch of an optional role can hold the longest sequence."""
    return rule(
        RLJobSpec,
        f"RLJobSpec.{role}.maxTokensPerMicroBatch",
        field=f".roles.{role}.sequenceParallel",
        cel=f"!({is_present_cel}) || {_splits_sequences_as_actor_cel(role)} || {_longest_sequence_fits_cel(role)}",
        wrong=_LONGEST_SEQUENCE.format(role),
        advice="use the actor's value, or increase maxTokensPerMicroBatch",
        holds=lambda spec: (
            not is_present(spec.training)
            or _splits_sequences_as_actor(spec, role)
            or _longest_sequence_fits(spec, role)
        ),
    )


_LONGEST_SEQUENCE = (
    "training.maxTokensPerMicroBatch x roles.{}.sequenceParallel must be at least dataset.maxPromptTokens +"
    " rollout.maxNewTokens, or environment.maxContextTokens"
)
_DIVISION_ADVICE = "change one of these numbers, so that all GPUs get the same number of responses"
_DIVISIBLE = (
    "{0} x rollout.groupSize x roles.{1}.sequenceParallel (1 when unset) must be divisible by the number of GPUs of the"
    " {1}'s pool (nodes x gpusPerNode)"
)
_MINI_BATCH_CEL = "(has(self.training.miniBatchSize) ? self.training.miniBatchSize : self.training.batchSize)"

BATCH_SIZE_RULES = (
    rule(
        Training,
        "Training.miniBatchSize",
        field=".miniBatchSize",
        cel="!has(self.miniBatchSize) || self.batchSize % self.miniBatchSize == 0",
        wrong="must divide batchSize",
        advice="choose a divisor of batchSize, or remove miniBatchSize for one update per step",
        holds=lambda t: t.mini_batch_size is None or t.batch_size % t.mini_batch_size == 0,
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.maxTokensPerMicroBatch",
        field=".training.maxTokensPerMicroBatch",
        cel=_longest_sequence_fits_cel("actor"),
        wrong=_LONGEST_SEQUENCE.format("actor"),
        advice="increase maxTokensPerMicroBatch, or reduce the length of sequences",
        holds=lambda spec: _longest_sequence_fits(spec, "actor"),
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.ref.maxTokensPerMicroBatch",
        field=".roles.ref.sequenceParallel",
        cel=f"!({MAY_NEED_REFERENCE_CEL}) || ({REFERENCE_IS_THE_ACTOR_CEL}) || {_longest_sequence_fits_cel('ref')}",
        wrong=_LONGEST_SEQUENCE.format("ref"),
        advice="use the actor's value, or increase maxTokensPerMicroBatch",
        holds=lambda spec: (
            not may_need_reference(spec) or reference_is_the_actor(spec) or _longest_sequence_fits(spec, "ref")
        ),
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.batchSize",
        field=".training.batchSize",
        cel=_responses_are_divisible_cel("self.training.batchSize"),
        wrong=_DIVISIBLE.format("batchSize", "actor"),
        advice=_DIVISION_ADVICE,
        holds=lambda spec: _responses_are_divisible(spec, spec.training.batch_size),
        details=lambda spec, _: _division(spec, spec.training.batch_size),
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.miniBatchSize",
        field=".training.miniBatchSize",
        cel="!has(self.training.miniBatchSize) || " + _responses_are_divisible_cel("self.training.miniBatchSize"),
        wrong=_DIVISIBLE.format("miniBatchSize", "actor"),
        advice=_DIVISION_ADVICE,
        holds=lambda spec: _responses_are_divisible(spec, spec.training.mini_batch_size),
        details=lambda spec, _: _division(spec, spec.training.mini_batch_size),
    ),
    _longest_sequence_rule(
        "critic", lambda t: may_need_critic(t.algorithm), may_need_critic_cel("self.training.algorithm")
    ),
    _longest_sequence_rule("rewardModel", has_reward_model, has_reward_model_cel("self.training")),
    rule(
        RLJobSpec,
        "RLJobSpec.critic.miniBatchSize",
        field=".roles.critic",
        cel=f"!({may_need_critic_cel('self.training.algorithm')}) || {_gets_batches_as_actor_cel('critic')}"
        f" || ({_responses_are_divisible_cel(_MINI_BATCH_CEL, 'critic')})",
        wrong=_DIVISIBLE.format("miniBatchSize (batchSize when unset)", "critic"),
        advice=_DIVISION_ADVICE,
        details=lambda spec, _: _division(spec, spec.training.mini_batch_size or spec.training.batch_size, "critic"),
        holds=lambda spec: (
            not may_need_critic(spec.training.algorithm)
            or _gets_batches_as_actor(spec, "critic")
            or _responses_are_divisible(spec, spec.training.mini_batch_size or spec.training.batch_size, "critic")
        ),
    ),
)
