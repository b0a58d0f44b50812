"""Selects the responses of a step that are trained on, and distributes them across workers.

Legend: B responses (prompts x group size), R rows of these responses, P rows of a batch for the workers: R, and padding
rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch

from rljob_api.v1alpha1.response_selection import PolicyFiltration
from rljob_trainer.algorithms.policy_filtration import drawn_rows
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.balanced_order import RowCosts, RowPlan, imbalance, planned_rows
from rljob_trainer.controller.rollout import TOKEN_COLUMNS, Rollout, row_numbers
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
    NUM_ROWS,
    NUM_TOKENS,
    PASS_MICRO_BATCHES,
    RESPONSE_NUMBERS,
    UPDATE_MICRO_BATCHES,
)

FILTRATION_STREAM = 5
"""Random stream of policy filtration; differs from the streams of `sample_seeds`."""


@dataclass(frozen=True)
class RowLayout:
    """The rows of a step's updates: for each update all rows of its responses, then padding rows, so that the number of
    rows is divisible by the number of workers. A padding row repeats the shortest row of the update. It is not trained
    on, and needs no computation."""

    source_P: torch.Tensor
    """int64: the row of the responses, from 0 to R - 1."""
    response_P: torch.Tensor
    """int64: the row's response."""
    is_padding_P: torch.Tensor
    """bool."""
    update_sizes: tuple[int, ...]
    """The number of rows of each update."""

    @staticmethod
    def of(num_rows_B: torch.Tensor, tokens_R: torch.Tensor, responses_per_update: int, num_workers: int) -> RowLayout:
        """`num_rows_B`: rows of each response; `tokens_R`: tokens of each row."""
        sources, sizes = list[torch.Tensor](), list[int]()
        first, num_padding = 0, list[int]()
        for counts in torch.split(num_rows_B, responses_per_update):
            rows = torch.arange(first, first + int(counts.sum()))
            num_padding.append(-len(rows) % num_workers)
            shortest = rows[tokens_R[rows].argmin()]
            sources.append(torch.cat([rows, shortest.repeat(num_padding[-1])]))
            sizes.append(len(sources[-1]))
            first += len(rows)
        source_P = torch.cat(sources)
        response_R = torch.arange(len(num_rows_B)).repeat_interleave(num_rows_B)
        is_padding = [torch.arange(size) >= size - padding for size, padding in zip(sizes, num_padding, strict=True)]
        return RowLayout(source_P, response_R[source_P], torch.cat(is_padding), tuple(sizes))


@dataclass
class StepRows:
    """A rollout, and which of its responses are used in the update. Tensors here are in the order of the rollout,
    batches for the workers in the order of `order_P`."""

    plan: StepPlan
    rollout: Rollout
    """The rollout; its scores may be added later."""
    is_kept_B: torch.Tensor
    """bool: whether the response counts for the advantages of its group; False if the whole group is dropped, and for
    an excluded response."""
    is_trained_B: torch.Tensor
    """bool: whether the response is used in the update: its group is kept, and it is not masked as truncated."""
    num_rows_B: torch.Tensor
    """int64: the number of rows of each response."""
    tokens_R: torch.Tensor
    """int64: the number of tokens of each row."""
    everything: Rollout | None = None
    """The rollout including groups that are not in the batch; None if the batch has all groups."""
    sampling_metrics: Metrics = field(default_factory=dict)
    drawn_B: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64: the response of `rollout` that each response here is; differs from 0, 1, 2, ... after policy
    filtration."""
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
        num_rows_B, tokens_R = rollout.batch[NUM_ROWS], rollout.rows[NUM_TOKENS]
        drawn_B = torch.arange(len(num_rows_B))
        return StepRows(
            plan, rollout, is_kept_B, is_trained_B, num_rows_B, tokens_R, everything, sampling_metrics or {}, drawn_B
        )

    @property
    def groups_B(self) -> torch.Tensor:
        """[B] int64: group number; equal for responses to the same prompt."""
        return self.rollout.groups_B

    @cached_property
    def layout(self) -> RowLayout:
        """The rows of the updates, in the order of the rollout."""
        return RowLayout.of(self.num_rows_B, self.tokens_R, self.plan.rows_per_update, self.plan.num_data_ranks)

    @cached_property
    def lengths_P(self) -> torch.Tensor:
        """[P] int64: tokens of the row; 0 if it is not used in the update. In the order of `layout`."""
        layout = self.layout
        is_used_P = self.is_trained_B[layout.response_P] & ~layout.is_padding_P
        return self.tokens_R[layout.source_P].where(is_used_P, 0)

    @cached_property
    def row_plan(self) -> RowPlan:
        """The plan of the rows for the actor's workers."""
        return self._planned_for(self.plan.num_data_ranks, self.plan.row_costs)

    @property
    def order_P(self) -> torch.Tensor:
        """[P] int64: the order of the rows of `layout` for the actor's workers."""
        return self.row_plan.order_B

    @property
    def has_trained_rows(self) -> bool:
        """Whether any response is used in the update."""
        return bool(self.is_trained_B.any())

    @property
    def has_several_rows(self) -> bool:
        """Whether a response has several rows, or there are padding rows."""
        return len(self.layout.source_P) != len(self.num_rows_B)

    def spread(self, values_B: torch.Tensor) -> torch.Tensor:
        """Returns [P]: the value of the row's response, for each row of the workers' batch; 0 for padding rows."""
        layout = self.layout
        return values_B[layout.response_P].masked_fill(layout.is_padding_P, 0)[self.order_P]

    def sums(self, values_P: torch.Tensor) -> torch.Tensor:
        """Returns [B]: the sum over the rows of each response, for a value of each row of the workers' batch."""
        values_R = self.own_rows(values_P)
        return torch.segment_reduce(values_R.double(), "sum", lengths=self.num_rows_B).to(values_P.dtype)

    def distributed_batch(self) -> DataProto:
        """Returns the rows in the order of the workers, and marks those that need forward passes. With KL in the reward
        these are all rows of the kept groups, because a masked response still counts in its group's mean and its reward
        includes its KL."""
        is_read_B = self.is_kept_B if self.plan.algorithm.kl.is_in_reward else self.is_trained_B
        rows = self.rollout.rows.only(TOKEN_COLUMNS)
        if self.plan.num_data_ranks > 1:
            rows = self.for_workers(rows)
        return rows.with_columns(
            {
                IS_TRAINED: self.spread(is_read_B),
                PASS_MICRO_BATCHES: self.row_plan.pass_micro_batch_B,
                **self._of_updates(self.row_plan),
            }
        )

    def without_uncounted(self, batch: DataProto, min_members: int) -> tuple[DataProto, StepRows]:
        """Drops the responses that do not count in their group (`Rollout.is_counted`), which is known once they have
        scores, and redistributes the rows across workers. Returns the new batch for the workers, which has no plan for
        passes, and the new rows; the same batch and these rows if there is nothing to drop."""
        is_counted_B = self.rollout.is_counted(min_members)
        self.num_alone = int((self.rollout.is_counted(1) & ~is_counted_B).sum())
        if not (self.is_kept_B & ~is_counted_B).any():
            return batch, self
        kept = replace(self, is_kept_B=self.is_kept_B & is_counted_B, is_trained_B=self.is_trained_B & is_counted_B)
        return kept._redistributed(self, batch, torch.arange(len(is_counted_B))), kept

    def with_responses_replaced(self, batch: DataProto, responses_B: torch.Tensor) -> tuple[DataProto, StepRows]:
        """Replaces each response i by response `responses_B[i]` and redistributes the rows across workers. Returns the
        new batch for the workers, which has no plan for passes, and the new rows."""
        rows = replace(
            self,
            is_trained_B=self.is_trained_B[responses_B],
            num_rows_B=self.num_rows_B[responses_B],
            tokens_R=self.tokens_R[row_numbers(self.num_rows_B, responses_B)],
            drawn_B=self.drawn_B[responses_B],
        )
        return rows._redistributed(self, batch, responses_B), rows

    def own_rows(self, values_P: torch.Tensor) -> torch.Tensor:
        """Returns [R]: the values of the rows of the workers' batch, in the order of the rollout and without padding
        rows."""
        return values_P[self.order_P.argsort()][~self.layout.is_padding_P]

    def by_response(self, batch: DataProto) -> list[DataProto]:
        """Returns the rows of the workers' batch in the order of the rollout, without padding rows, in one part for
        each worker. All rows of a response are in the same part."""
        batch = batch.rows(self.own_rows(torch.arange(len(batch))))
        parts = torch.tensor_split(self.num_rows_B, self.plan.num_data_ranks)
        ends = list(accumulate((int(part.sum()) for part in parts), initial=0))
        return [batch.slice(*each) for each in pairwise(ends)]

    def for_workers(self, rows: DataProto) -> DataProto:
        """Returns rows in the order of the rollout in the order of the workers' batch, with padding rows."""
        return rows.rows(self.layout.source_P[self.order_P])

    def for_critic(self, batch: DataProto) -> DataProto:
        """Returns the actor's batch in the order for the critic's workers, which differs if the critic has another
        number of data ranks or larger micro-batches. Each response must have one row."""
        if self.plan.critic_follows_actor:
            return batch
        plan = self._planned_for(self.plan.num_critic_ranks, self.plan.critic_row_costs)
        return batch.reorder(self.order_P.argsort()[plan.order_B]).with_columns(self._of_updates(plan))

    def metrics(self) -> Metrics:
        """Returns metrics: the fraction of responses used in the update, and how evenly work is distributed across
        workers."""
        num_ranks = self.plan.num_data_ranks
        planned = {MICRO_BATCH_IMBALANCE: self.row_plan.imbalance} if self.plan.has_flat_rows else {}
        return {
            **planned,
            TRAINED_FRACTION: float(self.is_trained_B.double().mean()),
            ALONE_FRACTION: self.num_alone / len(self.is_kept_B),
            TOKEN_IMBALANCE: imbalance(self.lengths_P[self.order_P], num_ranks),
            TOKEN_IMBALANCE_BEFORE: imbalance(self.lengths_P, num_ranks),
        }

    def _redistributed(self, before: StepRows, batch: DataProto, responses_B: torch.Tensor) -> DataProto:
        """Returns the workers' batch of these rows. `batch`: that of the rows `before`; `responses_B`: the response
        there for each response here."""
        places_R = before.own_rows(torch.arange(len(batch)))[row_numbers(before.num_rows_B, responses_B)]
        planned_before = [name for name in (PASS_MICRO_BATCHES, RESPONSE_NUMBERS) if name in batch]
        rows = self.for_workers(batch.without(planned_before).rows(places_R))
        columns = self._of_updates(self.row_plan)
        if self.layout.is_padding_P.any():
            columns[IS_TRAINED] = rows[IS_TRAINED] & ~self.layout.is_padding_P[self.order_P]
        return rows.with_columns(columns)

    def _planned_for(self, num_workers: int, costs: RowCosts) -> RowPlan:
        return planned_rows(self.lengths_P, num_workers, self.layout.update_sizes, costs)

    def _of_updates(self, plan: RowPlan) -> dict[str, torch.Tensor]:
        found = {UPDATE_MICRO_BATCHES: plan.update_micro_batch_B}
        if self.has_several_rows:
            found[RESPONSE_NUMBERS] = self.layout.response_P[plan.order_B]
        return found


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
