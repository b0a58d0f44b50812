"""One training step: the data flow as plain calls on worker groups.

    prompts -> rollout -> what is learned from -> log-probs (old, reference), values -> scores
            -> advantages -> updates (critic, actor)

Scores are computed while the passes for log-probabilities and values are made; where they say what is learned from,
they are waited for before.

What has a value per token stays with the workers; here are a few numbers per response. Where they are enough for the
advantages, those are computed here, else by the workers. Responses that are not learned from cost no pass but where
their KL counts, and the others are dealt out so that the work of all workers is alike. With policy filtration the
rows of the updates are drawn from those that have their advantages. Calls that do not depend on each other are not
waited for one by one: on different pools they run at the same time, on one pool one after the other.

Legend: B responses (prompts x group size).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rljob_api.v1alpha1.kl import KlControllerType
from rljob_api.v1alpha1.policy_filtration import PolicyFiltrationType
from rljob_api.v1alpha1.recipes import ResolvedAlgorithm
from rljob_trainer.algorithms.advantage_registry import advantage_estimator
from rljob_trainer.algorithms.advantages import zero_variance_mask
from rljob_trainer.algorithms.functions import in_step
from rljob_trainer.algorithms.interfaces import GREEDY_REWARDS, NAMED_REWARDS, ResponseInputs
from rljob_trainer.algorithms.kl import kl_in_reward, next_coefficient
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.balanced_order import balanced_order, imbalance
from rljob_trainer.controller.filtered_rows import filtered_rows
from rljob_trainer.controller.rollout_phase import RolloutPhase, ScoredRollout, UnscoredRollout, sample_seeds
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.observability.metrics import (
    ADVANTAGE_MEAN,
    DISTINCT_FRACTION,
    KL_COEFFICIENT,
    KL_LOSS,
    LEARNED_FRACTION,
    TOKEN_IMBALANCE,
    TOKEN_IMBALANCE_BEFORE,
    Metrics,
)
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.workers.columns import (
    ADVANTAGES,
    GROUPS,
    IS_LEARNED,
    IS_TRUNCATED,
    KL_SUMS,
    OLD_LOGPROBS,
    POLICY_VERSIONS,
    REF_LOGPROBS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    RETURNS,
    REWARDS,
    ROLLOUT_LOGPROBS,
    SCORES,
    TOKENS,
    VALUES,
)
from rljob_trainer.workers.protocols import ActorGroup, CriticGroup, PendingResult, ReferenceGroup

TRAINING_STREAM = 0
TOKEN_COLUMNS = (TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS, POLICY_VERSIONS)
"""Of a rollout: what an update needs."""
SCORED_COLUMNS = (TOKENS, RESPONSE_MASK, IS_LEARNED)
"""What a model needs that gives log-probabilities or values."""
VALUE_COLUMNS = (*SCORED_COLUMNS, VALUES, RETURNS)
"""What an update of the critic needs."""


@dataclass(frozen=True)
class StepPlan:
    """What every step has in common."""

    algorithm: ResolvedAlgorithm
    sampling: SamplingSettings
    group_size: int
    has_single_update: bool
    """One optimizer update per step: its own forward pass gives the old log-probabilities."""
    seed: int
    num_data_ranks: int
    """Parts that the actor's batch is split into."""
    num_critic_ranks: int
    """Parts that the critic's batch is split into."""
    critic_warmup_steps: int
    """Steps in which the critic alone is trained."""
    rows_per_update: int
    """Responses of an optimizer update, over all workers."""
    has_dropout: bool
    """An update's own forward pass drops inputs of adapters, and does not give the old log-probabilities."""
    sync_every_steps: int
    """Weights are handed to the rollout engine in the steps that are multiples of it, whatever has been before: so a
    resumed run does it in the same ones."""


class TrainingStep:
    """Runs steps. `reference` and `critic` are None where nothing needs them."""

    def __init__(
        self,
        plan: StepPlan,
        rollout: RolloutPhase,
        actor: ActorGroup,
        reference: ReferenceGroup | None,
        critic: CriticGroup | None,
        timer: PhaseTimer,
    ) -> None:
        self.plan = plan
        self.rollout = rollout
        self.actor = actor
        self.reference = reference
        self.critic = critic
        self.timer = timer
        self.kl_coefficient = plan.algorithm.kl.coefficient
        """Of the next step."""
        self.advantages = advantage_estimator(plan.algorithm, plan.group_size)
        self.needs_old_logprobs = (
            not plan.has_single_update
            or plan.has_dropout
            or OLD_LOGPROBS in self.advantages.needs
            or plan.algorithm.has_kl_in_reward
            or plan.algorithm.rollout_correction.rejection is not None
        )

    @property
    def kept_kl_coefficient(self) -> float | None:
        """What a checkpoint has to keep of the KL's controller."""
        is_fixed = self.plan.algorithm.kl.controller.type is KlControllerType.FIXED
        return None if is_fixed else self.kl_coefficient

    def restore_kl_coefficient(self, kept: float | None) -> None:
        """As a checkpoint has it. What another controller has made of it does not bind the job's own."""
        if kept is not None and self.kept_kl_coefficient is not None:
            self.kl_coefficient = kept

    def run(self, prompts: Sequence[PromptRow], step: int) -> tuple[ScoredRollout, dict[str, float]]:
        """Step `step` (from 0) on these prompts; the rollout and the step's metrics."""
        with in_step(step):
            return self._run(prompts, step)

    def _run(self, prompts: Sequence[PromptRow], step: int) -> tuple[ScoredRollout, dict[str, float]]:
        algorithm, group_size = self.plan.algorithm, self.plan.group_size
        seeds_B = sample_seeds(self.plan.seed, TRAINING_STREAM, step, len(prompts) * group_size)
        syncs = step % self.plan.sync_every_steps == 0
        with_greedy = GREEDY_REWARDS in self.advantages.needs
        sampling = self.plan.sampling
        unscored = self.rollout.begin(prompts, group_size, sampling, seeds_B, syncs=syncs, with_greedy=with_greedy)
        groups_B = torch.arange(len(unscored.prompts)) // group_size
        rollout, is_kept_B = self._with_kept_groups(unscored, groups_B)
        is_learned_B = is_kept_B & ~self._is_masked(unscored)
        lengths_B = unscored.lengths_B.where(is_learned_B, 0)
        order_B = balanced_order(lengths_B, self.plan.num_data_ranks, self.plan.rows_per_update)
        # A masked response counts in its group's mean, and so does its KL, which takes a pass.
        is_read_B = is_kept_B if algorithm.has_kl_in_reward else is_learned_B
        batch = unscored.batch.only(TOKEN_COLUMNS).with_columns({IS_LEARNED: is_read_B})
        batch = self._with_passes(batch.reorder(order_B) if self.plan.num_data_ranks > 1 else batch)
        rollout = rollout or self.rollout.scored(unscored)
        response_lengths_B = rollout.batch[RESPONSE_LENGTHS]
        kl_B = self._kl_for_reward(batch)[order_B.argsort()]
        batch = batch.with_columns({IS_LEARNED: is_learned_B[order_B]})
        if self.advantages.for_responses is not None:
            rewards_B = kl_in_reward(rollout.rewards_B, kl_B, self.kl_coefficient)
            advantages_B = torch.zeros_like(rewards_B)
            if is_kept_B.any():
                inputs = self._inputs(rollout, rewards_B, groups_B, is_kept_B)
                advantages_B[is_kept_B] = self.advantages.for_responses(inputs).float()
            batch = batch.with_columns({ADVANTAGES: advantages_B[order_B]})
        else:
            columns_B = {REWARDS: rollout.rewards_B[order_B], GROUPS: groups_B[order_B]}
            asked = batch.without([TOKENS]).with_columns(columns_B)
            batch = batch.union(self.actor.compute_token_advantages(asked, self.kl_coefficient))
        others: dict[str, float] = {}
        if algorithm.policy_filtration.type is not PolicyFiltrationType.NONE and is_learned_B.any():
            scores_B, seed = rollout.batch[SCORES], self.plan.seed
            rows = filtered_rows(algorithm.policy_filtration, scores_B, groups_B, is_learned_B, seed, step)
            places_B, lengths_B = order_B.argsort()[rows.drawn_B], lengths_B[rows.drawn_B]
            order_B = balanced_order(lengths_B, self.plan.num_data_ranks, self.plan.rows_per_update)
            batch, others[DISTINCT_FRACTION] = batch.rows(places_B[order_B]), rows.distinct_fraction
        metrics = self._updated(batch, lengths_B, order_B, step)
        if self.advantages.for_responses is not None and is_learned_B.any():
            others[ADVANTAGE_MEAN] = float(advantages_B[is_learned_B].mean())
        if algorithm.has_kl_in_reward and is_learned_B.any():
            others[KL_LOSS] = float(kl_B[is_learned_B].sum() / response_lengths_B[is_learned_B].sum())
        metrics |= others
        metrics |= self._controlled_kl(metrics, int(is_learned_B.sum()), step)
        return rollout, {
            **rollout.metrics(),
            **metrics,
            LEARNED_FRACTION: float(is_learned_B.double().mean()),
            TOKEN_IMBALANCE: imbalance(lengths_B[order_B], self.plan.num_data_ranks),
            TOKEN_IMBALANCE_BEFORE: imbalance(lengths_B, self.plan.num_data_ranks),
        }

    def _inputs(
        self, rollout: ScoredRollout, rewards_B: torch.Tensor, groups_B: torch.Tensor, is_kept_B: torch.Tensor
    ) -> ResponseInputs:
        """What an estimator on one number per response is given, of the responses that are kept."""
        greedy_B, needs = rollout.greedy_rewards_B, self.advantages.needs
        named = rollout.named_rewards_B if NAMED_REWARDS in needs else {}
        return ResponseInputs(
            rewards_B[is_kept_B],
            groups_B[is_kept_B],
            rollout.batch[RESPONSE_LENGTHS][is_kept_B],
            greedy_rewards_B=None if greedy_B is None else greedy_B[is_kept_B],
            named_rewards={name: each_B[is_kept_B] for name, each_B in named.items()},
            reward_weights=rollout.weights if named else {},
        )

    def _with_kept_groups(
        self, rollout: UnscoredRollout, groups_B: torch.Tensor
    ) -> tuple[ScoredRollout | None, torch.Tensor]:
        """Which responses' groups are kept, [B] bool. What is left out for its scores costs no pass, so that they are
        waited for then; else they may come while passes are made."""
        if not self.plan.algorithm.drop_zero_variance_groups:
            return None, torch.ones(len(groups_B), dtype=torch.bool)
        scored = self.rollout.scored(rollout)
        return scored, ~zero_variance_mask(scored.rewards_B, groups_B)

    def _is_masked(self, rollout: UnscoredRollout) -> torch.Tensor:
        """[B] bool: cut off at the limit of new tokens, where the job does not learn from such responses."""
        is_truncated_B = rollout.batch[IS_TRUNCATED]
        return is_truncated_B if self.plan.algorithm.mask_truncated_responses else torch.zeros_like(is_truncated_B)

    def _with_passes(self, batch: DataProto) -> DataProto:
        """The batch with the log-probabilities and values that are needed."""
        asked, calls = batch.only(SCORED_COLUMNS), dict[str, PendingResult[DataProto]]()
        if self.needs_old_logprobs:
            calls["old_logprob"] = self.actor.compute_logprobs(asked)
        if self.reference is not None:
            calls["ref"] = self.reference.compute_ref_logprobs(asked)
        if self.critic is not None:
            calls["values"] = self.critic.compute_values(asked)
        for phase, call in calls.items():
            with self.timer.phase(phase):
                batch = batch.union(call.result())
        return batch

    def _updated(self, batch: DataProto, lengths_B: torch.Tensor, order_B: torch.Tensor, step: int) -> dict[str, float]:
        """Updates critic and actor; the metrics of both. The batch has the rollout's rows in this order; `lengths_B`
        are the response tokens of the rollout's rows, 0 where they are not learned from."""
        calls = dict[str, PendingResult[Metrics]]()
        if self.critic is not None:
            rows = batch.only(VALUE_COLUMNS)
            if self.plan.num_critic_ranks != self.plan.num_data_ranks:
                critics_B = balanced_order(lengths_B, self.plan.num_critic_ranks, self.plan.rows_per_update)
                rows = rows.reorder(order_B.argsort()[critics_B])
            calls["update_critic"] = self.critic.update_critic(rows, step)
        if self._trains_actor(step):
            calls["update_actor"] = self.actor.update_policy(batch, step, self.kl_coefficient)
        metrics: dict[str, float] = {}
        for phase, call in calls.items():
            with self.timer.phase(phase):
                metrics.update(call.result())
        return metrics

    def _trains_actor(self, step: int) -> bool:
        return self.critic is None or step >= self.plan.critic_warmup_steps

    def _controlled_kl(self, metrics: Metrics, num_learned: int, step: int) -> dict[str, float]:
        """The coefficient that the step was made with, where there is a KL term; finds that of the next step. It stays
        where the policy has learned nothing: there the KL does not say what the coefficient does."""
        kl = self.plan.algorithm.kl
        if not kl.coefficient:
            return {}
        used = self.kl_coefficient
        if KL_LOSS in metrics and self._trains_actor(step):
            self.kl_coefficient = next_coefficient(kl.controller, used, metrics[KL_LOSS], num_learned)
        return {KL_COEFFICIENT: used}

    def _kl_for_reward(self, batch: DataProto) -> torch.Tensor:
        """[B]: KL of each of the batch's responses; zeros where the job puts none into the reward, and for what is not
        learned from."""
        if not self.plan.algorithm.has_kl_in_reward:
            return torch.zeros(len(batch))
        return self.actor.compute_kl_sums(batch.only([RESPONSE_MASK, OLD_LOGPROBS, REF_LOGPROBS]))[KL_SUMS]
