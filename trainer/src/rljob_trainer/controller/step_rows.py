"""Selects the responses of a step that are trained on, and distributes them across workers.

Legend: B responses (prompts x group size).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from rljob_api.v1alpha1.policy_filtration import PolicyFiltration
from rljob_trainer.algorithms.policy_filtration import drawn_rows
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.balanced_order import RowCosts, RowPlan, imbalance, planned_rows
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.controller.step_plan import StepPlan
from rljob_trainer.observability.metrics import (
    ALONE_FRACTION,
    MICRO_BATCH_IMBALANCE,
    TOKEN_IMBALANCE,
    TOKEN_IMBALANCE_BEFORE,
    TRAINED_FRACTION,
    Metrics,
)
from rljob_trainer.workers.columns import (
    IS_TRAINED,
    IS_TRUNCATED,
    PASS_MICRO_BATCHES,
    POLICY_VERSIONS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    TOKENS,
    UPDATE_MICRO_BATCHES,
)

TOKEN_COLUMNS = (TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS, POLICY_VERSIONS)
"""Columns of a rollout that an update needs."""
FILTRATION_STREAM = 5
"""Random stream of policy filtration; differs from the streams of `sample_seeds`."""


@dataclass
class StepRows:
    """A rollout, and which of its rows are used in the update. Tensors here are in the order of the rollout, batches
    for the workers in the order of `order_B`."""

    plan: StepPlan
    rollout: Rollout
    """The rollout; its scores may be added later."""
    is_kept_B: torch.Tensor
    """bool: whether the response counts for the advantages of its group; False if the whole group is dropped, and for
    an excluded response."""
    is_trained_B: torch.Tensor
    """bool: whether the response is used in the update: its group is kept, and it is not masked as truncated."""
    lengths_B: torch.Tensor
    """int64: tokens of prompt and response; 0 if the response is not used in the update."""
    everything: Rollout | None = None
    """The rollout including groups that are not in the batch; None if the batch has all groups."""
    sampling_metrics: Metrics = field(default_factory=dict)
    num_alone: int = 0
    """Responses that are dropped because all others of their group were excluded."""

    @staticmethod
    def of(
        plan: StepPlan,
        rollout: Rollout,
        is_kept_B: torch.Tensor,
        everything: Rollout | None = None,
        sampling_metrics: Metrics | None = None,
    ) -> StepRows:
        """Creates the rows of a rollout."""
        is_trained_B = is_kept_B
        if plan.algorithm.mask_truncated_responses:
            is_trained_B = is_kept_B & ~rollout.batch[IS_TRUNCATED]
        lengths_B = rollout.lengths_B.where(is_trained_B, 0)
        return StepRows(plan, rollout, is_kept_B, is_trained_B, lengths_B, everything, sampling_metrics or {})

    @property
    def groups_B(self) -> torch.Tensor:
        """[B] int64: group number; equal for responses to the same prompt."""
        return self.rollout.groups_B

    @cached_property
    def row_plan(self) -> RowPlan:
        """The plan of the rows for the actor's workers."""
        return self._planned_for(self.plan.num_data_ranks, self.plan.row_costs)

    @property
    def order_B(self) -> torch.Tensor:
        """[B] int64: the order of the rows for the actor's workers."""
        return self.row_plan.order_B

    @property
    def has_trained_rows(self) -> bool:
        """Whether any response is used in the update."""
        return bool(self.is_trained_B.any())

    def distributed_batch(self) -> DataProto:
        """Returns the rollout's batch in the order of the workers, and marks the rows that need forward passes. With KL
        in the reward these are all rows of the kept groups, because a masked response still counts in its group's mean
        and its reward includes its KL."""
        is_read_B = self.is_kept_B if self.plan.algorithm.kl.is_in_reward else self.is_trained_B
        marked = self.rollout.batch.only(TOKEN_COLUMNS).with_columns({IS_TRAINED: is_read_B})
        ordered = marked.reorder(self.order_B) if self.plan.num_data_ranks > 1 else marked
        return ordered.with_columns(
            {PASS_MICRO_BATCHES: self.row_plan.pass_micro_batch_B, **_of_updates(self.row_plan)}
        )

    def without_uncounted(self, batch: DataProto, min_members: int) -> tuple[DataProto, StepRows]:
        """Drops the responses that do not count in their group (`Rollout.is_counted`), which is known once they have
        scores, and redistributes the rows across workers. Returns the new batch for the workers, which has no plan for
        passes, and the new rows; the same batch and these rows if there is nothing to drop."""
        is_counted_B = self.rollout.is_counted(min_members)
        self.num_alone = int((self.rollout.is_counted(1) & ~is_counted_B).sum())
        if not (self.is_kept_B & ~is_counted_B).any():
            return batch, self
        kept = replace(
            self,
            is_kept_B=self.is_kept_B & is_counted_B,
            is_trained_B=self.is_trained_B & is_counted_B,
            lengths_B=self.lengths_B.where(is_counted_B, 0),
        )
        return kept.with_rows_replaced(batch, torch.arange(len(is_counted_B)), self.order_B)

    def with_rows_replaced(
        self, batch: DataProto, rows_B: torch.Tensor, order_B: torch.Tensor | None = None
    ) -> tuple[DataProto, StepRows]:
        """Replaces each row i by row `rows_B[i]` and redistributes the rows across workers. Returns the new batch for
        the workers, which has no plan for passes, and the new rows. `order_B`: the order of the rows in `batch`, if it
        is not that of these rows."""
        positions_B = (self.order_B if order_B is None else order_B).argsort()[rows_B]
        rows = replace(self, is_trained_B=self.is_trained_B[rows_B], lengths_B=self.lengths_B[rows_B])
        kept = batch.without([PASS_MICRO_BATCHES]).rows(positions_B[rows.order_B])
        return kept.with_columns(_of_updates(rows.row_plan)), rows

    def for_critic(self, batch: DataProto) -> DataProto:
        """Returns the actor's batch in the order for the critic's workers, which differs if the critic has another
        number of data ranks or larger micro-batches."""
        if self.plan.critic_follows_actor:
            return batch
        plan = self._planned_for(self.plan.num_critic_ranks, self.plan.critic_row_costs)
        return batch.reorder(self.order_B.argsort()[plan.order_B]).with_columns(_of_updates(plan))

    def metrics(self) -> Metrics:
        """Returns metrics: the fraction of responses used in the update, and how evenly work is distributed across
        workers."""
        num_ranks = self.plan.num_data_ranks
        planned = {MICRO_BATCH_IMBALANCE: self.row_plan.imbalance} if self.plan.has_flat_rows else {}
        return {
            **planned,
            TRAINED_FRACTION: float(self.is_trained_B.double().mean()),
            ALONE_FRACTION: self.num_alone / len(self.is_kept_B),
            TOKEN_IMBALANCE: imbalance(self.lengths_B[self.order_B], num_ranks),
            TOKEN_IMBALANCE_BEFORE: imbalance(self.lengths_B, num_ranks),
        }

    def _planned_for(self, num_workers: int, costs: RowCosts) -> RowPlan:
        return planned_rows(self.lengths_B, num_workers, self.plan.rows_per_update, costs)


def _of_updates(plan: RowPlan) -> dict[str, torch.Tensor]:
    return {UPDATE_MICRO_BATCHES: plan.update_micro_batch_B}


def filtered_rows(
    filtration: PolicyFiltration,
    scores_B: torch.Tensor,
    groups_B: torch.Tensor,
    is_trained_B: torch.Tensor,
    job_seed: int,
    step: int,
) -> torch.Tensor:
    """Returns [B] int64: for each row the rollout's row that replaces it, drawn by policy filtration. The draw is the
    same for any number of workers and in a resumed run. `is_trained_B` must have at least one true value."""
    # NumPy guarantees the same raw output in all versions (NEP 19), but not the same floats. 53 bits make a double.
    source = np.random.Philox(np.random.SeedSequence([job_seed, FILTRATION_STREAM, step]))
    uniform_B = torch.from_numpy((source.random_raw(len(scores_B)) >> np.uint64(11)) * 2.0**-53)
    return drawn_rows(scores_B, groups_B, is_trained_B, filtration, uniform_B)
