"""What all steps of a job have in common."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.handover import TrainerJob
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_trainer.controller.engine_settings import critic_of
from rljob_trainer.controller.job_checks import needs_critic
from rljob_trainer.controller.model_roles import num_data_ranks_of
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.workers.factories import ACTOR, CRITIC


@dataclass(frozen=True)
class StepPlan:
    """What every step has in common."""

    algorithm: Algorithm
    """Resolved."""
    sampling: SamplingSettings
    group_size: int
    has_single_update: bool
    """One optimizer update per step: its own forward pass gives the old log-probabilities."""
    seed: int
    num_data_ranks: int
    """Parts that the actor's batch is split into."""
    num_critic_ranks: int
    """Parts that the critic's batch is split into; where there is no critic, the same."""
    critic_warmup_steps: int
    """Steps in which the critic alone is trained."""
    rows_per_update: int
    """Responses of an optimizer update, over all workers."""
    has_dropout: bool
    """An update's own forward pass drops inputs of adapters, and does not give the old log-probabilities."""
    sync_every_steps: int
    """Weights are handed to the rollout engine in the steps that are multiples of it, whatever has been before: so a
    resumed run does it in the same ones."""

    def trains_actor(self, step: int) -> bool:
        """Whether step `step` (from 0) is behind the critic's warm-up."""
        return step >= self.critic_warmup_steps


def step_plan(job: TrainerJob) -> StepPlan:
    """What the job says about every step."""
    training = job.spec.training
    rollout = training.rollout
    mini_batch_size = training.mini_batch_size or training.batch_size
    return StepPlan(
        algorithm=resolve_algorithm(training.algorithm),
        sampling=SamplingSettings(
            rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens, rollout.stop
        ),
        group_size=rollout.group_size,
        has_single_update=mini_batch_size == training.batch_size and training.num_epochs_per_batch == 1,
        seed=training.seed,
        num_data_ranks=num_data_ranks_of(job.spec, ACTOR),
        num_critic_ranks=num_data_ranks_of(job.spec, CRITIC if needs_critic(job.spec) else ACTOR),
        critic_warmup_steps=critic_of(job.spec).warmup_steps,
        rows_per_update=mini_batch_size * rollout.group_size,
        has_dropout=training.model.lora is not None and training.model.lora.dropout > 0,
        sync_every_steps=rollout.sync_every_steps,
    )
