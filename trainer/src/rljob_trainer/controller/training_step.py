"""One training step: the data flow of GRPO as plain calls on worker groups.

    prompts -> rollout -> reward -> log-probs (old, reference) -> advantages -> update of the actor

Legend: B responses (prompts x group size), T tokens of prompt and response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rljob_api.v1alpha1.algorithm import Algorithm, KlPlacement
from rljob_trainer.algorithms.advantages import group_relative_advantages, zero_variance_mask
from rljob_trainer.algorithms.kl import kl_estimate, kl_in_reward
from rljob_trainer.controller.rollout_phase import RolloutPhase, ScoredRollout, sample_seeds
from rljob_trainer.data.prompts import PromptRow
from rljob_trainer.data.proto import DataProto
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.observability.metrics import ADVANTAGE_MEAN, KL_LOSS
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.workers.columns import ADVANTAGES, OLD_LOGPROBS, REF_LOGPROBS, RESPONSE_MASK, TOKENS
from rljob_trainer.workers.protocols import ActorGroup, ReferenceGroup

TRAINING_STREAM = 0


@dataclass(frozen=True)
class StepPlan:
    """What every step has in common."""

    algorithm: Algorithm
    sampling: SamplingSettings
    group_size: int
    has_single_update: bool
    """One optimizer update per step: its own forward pass gives the old log-probabilities."""
    seed: int


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
        group_prompts = [prompt for prompt in prompts for _ in range(self.plan.group_size)]
        seeds_B = sample_seeds(self.plan.seed, TRAINING_STREAM, step, len(group_prompts))
        rollout = self.rollout.run(group_prompts, self.plan.sampling, seeds_B)
        batch = rollout.batch
        kl = self.plan.algorithm.kl
        kl_in_rewards = self.reference is not None and kl.placement is KlPlacement.REWARD
        if kl_in_rewards or not self.plan.has_single_update:
            with self.timer.phase("old_logprob"):
                batch = batch.union(self.actor.compute_logprobs(batch.select([TOKENS, RESPONSE_MASK])))
        if self.reference is not None:
            with self.timer.phase("ref"):
                batch = batch.union(self.reference.compute_ref_logprobs(batch.select([TOKENS, RESPONSE_MASK])))
        rewards_B = rollout.rewards_B
        kl_metrics: dict[str, float] = {}
        if kl_in_rewards:
            kl_BT = kl_estimate(batch[OLD_LOGPROBS], batch[REF_LOGPROBS], kl.estimator)
            rewards_B = kl_in_reward(rewards_B, kl_BT, batch[RESPONSE_MASK], kl.coefficient)
            kl_metrics = {KL_LOSS: float(kl_BT[batch[RESPONSE_MASK]].mean())}
        batch, advantages_B = self._with_advantages(batch, rewards_B)
        with self.timer.phase("update_actor"):
            metrics = dict(self.actor.update_policy(_for_update(batch), step))
        return rollout, {
            **rollout.metrics(),
            **metrics,
            **kl_metrics,
            ADVANTAGE_MEAN: float(advantages_B.mean()),
        }

    def _with_advantages(self, batch: DataProto, rewards_B: torch.Tensor) -> tuple[DataProto, torch.Tensor]:
        """Adds ADVANTAGES [B, T]; sequences that are left out lose their response mask."""
        grpo = self.plan.algorithm.grpo
        groups_B = torch.arange(len(batch)) // self.plan.group_size
        advantages_B = group_relative_advantages(rewards_B, groups_B, normalize_by_std=grpo.normalize_by_std)
        mask_BT = batch[RESPONSE_MASK]
        if grpo.drop_zero_variance_groups:
            mask_BT = mask_BT & ~zero_variance_mask(rewards_B, groups_B)[:, None]
        return batch.with_columns({RESPONSE_MASK: mask_BT, ADVANTAGES: advantages_B[:, None] * mask_BT}), advantages_B


def _for_update(batch: DataProto) -> DataProto:
    """Tensor columns only: texts stay with the controller."""
    return batch.select(sorted(batch.tensors))
