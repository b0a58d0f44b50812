"""Which of a step's responses are learned from, and who computes them.

Legend: B responses (prompts x group size).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.balanced_order import balanced_order, imbalance
from rljob_trainer.controller.dynamic_sampling import StepRollout
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


@dataclass(frozen=True)
class StepRows:
    """Columns are in the order of the rollout; batches for the workers in that of `order_B`."""

    plan: StepPlan
    groups_B: torch.Tensor
    """int64: equal for responses to the same prompt."""
    is_kept_B: torch.Tensor
    """bool: the response counts in its group."""
    is_learned_B: torch.Tensor
    """bool: likewise, and was not cut off where the job does not learn from such responses."""
    lengths_B: torch.Tensor
    """int64: tokens of prompt and response, 0 where it is not learned from."""
    order_B: torch.Tensor
    """int64: `balanced_order` of the actor's workers."""

    @staticmethod
    def of(generated: StepRollout, plan: StepPlan) -> StepRows:
        """Those of a rollout."""
        rollout, is_kept_B = generated.rows, generated.is_kept_B
        is_learned_B = is_kept_B
        if plan.algorithm.mask_truncated_responses:
            is_learned_B = is_kept_B & ~rollout.batch[IS_TRUNCATED]
        lengths_B = rollout.lengths_B.where(is_learned_B, 0)
        return StepRows(
            plan,
            groups_B=torch.arange(len(is_kept_B)) // plan.group_size,
            is_kept_B=is_kept_B,
            is_learned_B=is_learned_B,
            lengths_B=lengths_B,
            order_B=balanced_order(lengths_B, plan.num_data_ranks, plan.rows_per_update),
        )

    @property
    def learns(self) -> bool:
        """Whether there is anything to learn from."""
        return bool(self.is_learned_B.any())

    def dealt_out(self, batch: DataProto) -> DataProto:
        """The rollout's batch as the workers get it, with the rows marked that cost a pass: a response that is masked
        counts in its group's mean, and so does its KL, which takes one."""
        is_read_B = self.is_kept_B if self.plan.algorithm.kl.is_in_reward else self.is_learned_B
        marked = batch.only(TOKEN_COLUMNS).with_columns({IS_LEARNED: is_read_B})
        return marked.reorder(self.order_B) if self.plan.num_data_ranks > 1 else marked

    def drawn(self, batch: DataProto, rows_B: torch.Tensor) -> tuple[DataProto, StepRows]:
        """The workers' batch with the rollout's row `rows_B[i]` in the place of row i, dealt out anew."""
        lengths_B = self.lengths_B[rows_B]
        order_B = balanced_order(lengths_B, self.plan.num_data_ranks, self.plan.rows_per_update)
        places_B = self.order_B.argsort()[rows_B]
        rows = replace(self, is_learned_B=self.is_learned_B[rows_B], lengths_B=lengths_B, order_B=order_B)
        return batch.rows(places_B[order_B]), rows

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
