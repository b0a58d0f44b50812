"""The settings that all steps of a job share."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_trainer.controller.balanced_order import RowCosts
from rljob_trainer.engines.rollout.base import SamplingSettings


@dataclass(frozen=True)
class StepPlan:
    """The settings that all steps of a job share."""

    algorithm: Algorithm
    """The resolved algorithm: all fields are set."""
    sampling: SamplingSettings
    group_size: int
    has_single_update: bool
    """Whether each step has only one optimizer update. Then the update's own forward pass computes the old
    log-probabilities."""
    seed: int
    num_data_ranks: int
    """Number of parts that the actor's batch is split into."""
    num_critic_ranks: int
    """Number of parts that the critic's batch is split into; without a critic equal to num_data_ranks."""
    critic_warmup_steps: int
    """Number of steps at the start in which only the critic is trained."""
    row_costs: RowCosts
    """What the actor's rows cost, and what fits into its micro-batches."""
    critic_row_costs: RowCosts
    """The same for the critic; without a critic equal to row_costs."""
    reference_follows_actor: bool
    """Whether the micro-batches that are planned for the actor suit the reference: it has as many data ranks, and as
    many tokens fit into its micro-batches."""
    rows_per_update: int
    """Responses per optimizer update, over all workers."""
    has_dropout: bool
    """Whether adapters have dropout, so that an update's forward pass cannot provide the old log-probabilities."""
    sync_every_steps: int
    """The rollout engine gets new weights in steps that are multiples of this, counted from step 0 of the job, so that
    a resumed run syncs in the same steps."""
    max_failure_rate: float = 1.0
    """`training.maxFailureRate`."""
    refills_groups: bool = False
    """Whether responses are generated that replace excluded ones (`training.onIncompleteGroup`)."""
    has_flat_rows: bool = True
    """Whether the policy's model takes rows without padding. Only then its workers follow planned micro-batches."""

    @property
    def critic_follows_actor(self) -> bool:
        """The same as `reference_follows_actor` for the critic."""
        return self.num_critic_ranks == self.num_data_ranks and self.critic_row_costs == self.row_costs

    def trains_actor(self, step: int) -> bool:
        """Whether the policy is trained in step `step` (from 0), that is, after the critic's warm-up."""
        return step >= self.critic_warmup_steps
