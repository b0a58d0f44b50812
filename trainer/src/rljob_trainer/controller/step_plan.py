"""What all steps of a job have in common."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_trainer.engines.rollout.base import SamplingSettings


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
