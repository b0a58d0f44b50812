"""One training step: the data flow of GRPO as plain calls on worker groups.

    prompts -> rollout -> reward -> log-probs (old, reference) -> advantages -> update of the actor

What has a value per token stays with the workers; here are one reward and one advantage per response. After the
rewards, rows go to other workers where that makes the work of all more alike.

Legend: B responses (prompts x group size).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rljob_api.v1alpha1.algorithm import Algorithm, KlPlacement
from rljob_trainer.algorithms.advantages import group_relative_advantages, zero_variance_mask
from rljob_trainer.algorithms.kl import kl_in_reward
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.balanced_order import balanced_order, imbalance
from rljob_trainer.controller.rollout_phase import RolloutPhase, ScoredRollout, sample_seeds
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.observability.metrics import ADVANTAGE_MEAN, KL_LOSS, TOKEN_IMBALANCE, TOKEN_IMBALANCE_BEFORE
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.workers.columns import (
    ADVANTAGES,
    IS_LEARNED,
    KL_SUMS,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    TOKENS,
)
from rljob_trainer.workers.protocols import ActorGroup, ReferenceGroup

TRAINING_STREAM = 0
TOKEN_COLUMNS = (TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS)
"""Of a rollout: what an update needs."""


@dataclass(frozen=True)
class StepPlan:
    """What every step has in common."""

    algorithm: Algorithm
    sampling: SamplingSettings
    group_size: int
    has_single_update: bool
    """One optimizer update per step: its own forward pass gives the old log-probabilities."""
    seed: int
    num_workers: int
    """Of the actor."""
    rows_per_update: int
    """Responses of an optimizer update, over all workers."""


class TrainingStep:
    """Runs steps. `reference` is None where the KL coefficient is 0."""

    def __init__(
        self,
        plan: StepPlan,
        rollout: RolloutPhase,
        actor: ActorGroup,
        reference: ReferenceGroup | None,
        timer: PhaseTimer,
    ) -> None:
        self.plan = plan
        self.rollout = rollout
        self.actor = actor
        self.reference = reference
        self.timer = timer

    def run(self, prompts: Sequence[PromptRow], step: int) -> tuple[ScoredRollout, dict[str, float]]:
        """Step `step` (from 0) on these prompts; the rollout and the step's metrics."""
        group_size = self.plan.group_size
        seeds_B = sample_seeds(self.plan.seed, TRAINING_STREAM, step, len(prompts) * group_size)
        rollout = self.rollout.run(prompts, group_size, self.plan.sampling, seeds_B)
        lengths_B = rollout.lengths_B
        order_B = balanced_order(lengths_B, self.plan.num_workers, self.plan.rows_per_update)
        batch = rollout.batch.only(TOKEN_COLUMNS)
        if self.plan.num_workers > 1:
            batch = batch.reorder(order_B)
        kl = self.plan.algorithm.kl
        kl_in_rewards = self.reference is not None and kl.placement is KlPlacement.REWARD
        if kl_in_rewards or not self.plan.has_single_update:
            with self.timer.phase("old_logprob"):
                batch = batch.union(self.actor.compute_logprobs(batch.only([TOKENS, RESPONSE_MASK])))
        if self.reference is not None:
            with self.timer.phase("ref"):
                batch = batch.union(self.reference.compute_ref_logprobs(batch.only([TOKENS, RESPONSE_MASK])))
        rewards_B = rollout.rewards_B[order_B]
        kl_metrics: dict[str, float] = {}
        if kl_in_rewards:
            kl_B = self.actor.compute_kl_sums(batch.only([RESPONSE_MASK, OLD_LOGPROBS, REF_LOGPROBS]))[KL_SUMS]
            rewards_B = kl_in_reward(rewards_B, kl_B, kl.coefficient)
            kl_metrics = {KL_LOSS: float(kl_B.sum() / rollout.batch[RESPONSE_LENGTHS].sum())}
        advantages = self._advantages(rewards_B, order_B // group_size)
        with self.timer.phase("update_actor"):
            metrics = dict(self.actor.update_policy(batch.union(advantages), step))
        return rollout, {
            **rollout.metrics(),
            **metrics,
            **kl_metrics,
            ADVANTAGE_MEAN: float(advantages[ADVANTAGES].mean()),
            TOKEN_IMBALANCE: imbalance(lengths_B[order_B], self.plan.num_workers),
            TOKEN_IMBALANCE_BEFORE: imbalance(lengths_B, self.plan.num_workers),
        }

    def _advantages(self, rewards_B: torch.Tensor, groups_B: torch.Tensor) -> DataProto:
        """ADVANTAGES, and IS_LEARNED, which is false for sequences that are left out."""
        grpo = self.plan.algorithm.grpo
        advantages_B = group_relative_advantages(rewards_B, groups_B, normalize_by_std=grpo.normalize_by_std)
        is_learned_B = torch.ones(len(rewards_B), dtype=torch.bool)
        if grpo.drop_zero_variance_groups:
            is_learned_B = ~zero_variance_mask(rewards_B, groups_B)
        return DataProto({ADVANTAGES: advantages_B, IS_LEARNED: is_learned_B})
