"""Rules on the sizes of batches: mini-batches, micro-batches, and how they spread over the GPUs."""

from __future__ import annotations

from rljob_api.v1alpha1.roles import pool_of_cel
from rljob_api.v1alpha1.rule import rule
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.training import Training


def _longest_sequence_fits(training: Training) -> bool:
    longest = training.dataset.max_prompt_tokens + training.rollout.max_new_tokens
    return training.max_tokens_per_micro_batch >= longest


def _responses_divide(spec: RLJobSpec, num_prompts: int | None) -> bool:
    """Whether the responses to these prompts spread evenly over all GPUs of the actor's pool."""
    name = spec.placed_roles()["actor"]
    num_responses = (num_prompts or 0) * spec.training.rollout.group_size
    return all(num_responses % (p.nodes * p.gpus_per_node) == 0 for p in spec.pools if p.name == name)


def _responses_divide_cel(field: str) -> str:
    return (
        f"self.pools.all(p, p.name != {pool_of_cel('actor')}"
        f" || {field} * self.training.rollout.groupSize % (p.nodes * p.gpusPerNode) == 0)"
    )


BATCH_SIZE_RULES = (
    rule(
        Training,
        "Training.miniBatchSize",
        field=".miniBatchSize",
        cel="!has(self.miniBatchSize) || self.batchSize % self.miniBatchSize == 0",
        wrong="must divide batchSize",
        advice="choose a divisor of batchSize, or leave it out for one update per batch",
        holds=lambda t: t.mini_batch_size is None or t.batch_size % t.mini_batch_size == 0,
    ),
    rule(
        Training,
        "Training.maxTokensPerMicroBatch",
        field=".maxTokensPerMicroBatch",
        cel="self.maxTokensPerMicroBatch >= self.dataset.maxPromptTokens + self.rollout.maxNewTokens",
        wrong="must hold one longest sequence: dataset.maxPromptTokens + rollout.maxNewTokens tokens",
        advice="raise it, or lower one of the two",
        holds=_longest_sequence_fits,
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.batchSize",
        field=".training.batchSize",
        cel=_responses_divide_cel("self.training.batchSize"),
        wrong="batchSize * rollout.groupSize must be divisible by nodes * gpusPerNode of the pool",
        advice="change one of them, so that every GPU trains on as many responses as the others",
        holds=lambda spec: _responses_divide(spec, spec.training.batch_size),
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.miniBatchSize",
        field=".training.miniBatchSize",
        cel="!has(self.training.miniBatchSize) || " + _responses_divide_cel("self.training.miniBatchSize"),
        wrong="miniBatchSize * rollout.groupSize must be divisible by nodes * gpusPerNode of the pool",
        advice="change one of them, so that every GPU trains on as many responses as the others",
        holds=lambda spec: _responses_divide(spec, spec.training.mini_batch_size),
    ),
)
