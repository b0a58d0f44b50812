"""Which of a step's responses are learned from, and who computes them.

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
from rljob_trainer.controller.balanced_order import balanced_order, imbalance
from rljob_trainer.controller.rollout_phase import Rollout
from rljob_trainer.controller.step_plan import StepPlan
from rljob_trainer.observability.metrics import LEARNED_FRACTION, TOKEN_IMBALANCE, TOKEN_IMBALANCE_BEFORE, Metrics
from rljob_trainer.workers.columns import (
    IS_LEARNED,
    IS_TRUNCATED,
    POLICY_VERSIONS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    TOKENS,
)

TOKEN_COLUMNS = (TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS, POLICY_VERSIONS)
"""Of a rollout: what an update needs."""
FILTRATION_STREAM = 5
"""Beside those of the responses' seeds (`sample_seeds`)."""


@dataclass
class StepRows:
    """A rollout, and which of its rows an update takes. Columns are in the order of the rollout; batches for the
    workers in that of `order_B`."""

    plan: StepPlan
    rollout: Rollout
    """Gets its scores while passes are made."""
    is_kept_B: torch.Tensor
    """bool: the response counts in its group."""
    is_learned_B: torch.Tensor
    """bool: likewise, and was not cut off where the job does not learn from such responses."""
    lengths_B: torch.Tensor
    """int64: tokens of prompt and response, 0 where it is not learned from."""
    everything: Rollout | None = None
    """With the groups that have no place in the batch; None where there are no others."""
    sampling_metrics: Metrics = field(default_factory=dict)

    @staticmethod
    def of(
        plan: StepPlan,
        rollout: Rollout,
        is_kept_B: torch.Tensor,
        everything: Rollout | None = None,
        sampling_metrics: Metrics | None = None,
    ) -> StepRows:
        """Those of a rollout."""
        is_learned_B = is_kept_B
        if plan.algorithm.mask_truncated_responses:
            is_learned_B = is_kept_B & ~rollout.batch[IS_TRUNCATED]
        lengths_B = rollout.lengths_B.where(is_learned_B, 0)
        return StepRows(plan, rollout, is_kept_B, is_learned_B, lengths_B, everything, sampling_metrics or {})

    @property
    def groups_B(self) -> torch.Tensor:
        """int64: equal for responses to the same prompt."""
        return torch.arange(len(self.is_kept_B)) // self.plan.group_size

    @cached_property
    def order_B(self) -> torch.Tensor:
        """int64: `balanced_order` of the actor's workers."""
        return balanced_order(self.lengths_B, self.plan.num_data_ranks, self.plan.rows_per_update)

    @property
    def learns(self) -> bool:
        """Whether there is anything to learn from."""
        return bool(self.is_learned_B.any())

    def dealt_out(self) -> DataProto:
        """The rollout's batch as the workers get it, with the rows marked that cost a pass: a response that is masked
        counts in its group's mean, and so does its KL, which takes one."""
        is_read_B = self.is_kept_B if self.plan.algorithm.kl.is_in_reward else self.is_learned_B
        marked = self.rollout.batch.only(TOKEN_COLUMNS).with_columns({IS_LEARNED: is_read_B})
        return marked.reorder(self.order_B) if self.plan.num_data_ranks > 1 else marked

    def drawn(self, batch: DataProto, rows_B: torch.Tensor) -> tuple[DataProto, StepRows]:
        """The workers' batch with the rollout's row `rows_B[i]` in the place of row i, dealt out anew."""
        places_B = self.order_B.argsort()[rows_B]
        rows = replace(self, is_learned_B=self.is_learned_B[rows_B], lengths_B=self.lengths_B[rows_B])
        return batch.rows(places_B[rows.order_B]), rows

    def for_critic(self, batch: DataProto) -> DataProto:
        """The workers' batch as the critic's workers get it."""
        if self.plan.num_critic_ranks == self.plan.num_data_ranks:
            return batch
        critics_B = balanced_order(self.lengths_B, self.plan.num_critic_ranks, self.plan.rows_per_update)
        return batch.reorder(self.order_B.argsort()[critics_B])

    def metrics(self) -> Metrics:
        """How much is learned from, and how evenly it is dealt out."""
        num_ranks = self.plan.num_data_ranks
        return {
            LEARNED_FRACTION: float(self.is_learned_B.double().mean()),
            TOKEN_IMBALANCE: imbalance(self.lengths_B[self.order_B], num_ranks),
            TOKEN_IMBALANCE_BEFORE: imbalance(self.lengths_B, num_ranks),
        }


def filtered_rows(
    filtration: PolicyFiltration,
    scores_B: torch.Tensor,
    groups_B: torch.Tensor,
    is_learned_B: torch.Tensor,
    job_seed: int,
    step: int,
) -> torch.Tensor:
    """[B] int64: the row of a rollout that is learned from in the place of each, where the job draws them by their
    scores: the same on any number of workers, and in a resumed run. At least one row is learned from."""
    # Raw output, whose stream NumPy promises to keep between versions (NEP 19); 53 bits of it.
    source = np.random.Philox(np.random.SeedSequence([job_seed, FILTRATION_STREAM, step]))
    uniform_B = torch.from_numpy((source.random_raw(len(scores_B)) >> np.uint64(11)) * 2.0**-53)
    return drawn_rows(scores_B, groups_B, is_learned_B, filtration, uniform_B)
