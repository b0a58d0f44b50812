"""One training step: the data flow as plain calls on worker groups.

    prompts -> rollout -> selection of responses -> log-probs (old, reference), values -> scores
            -> advantages -> updates (critic, actor)

Scores are computed at the same time as the forward passes for log-probabilities and values. If the selection depends on
scores, the step waits for them before the forward passes. Dynamic sampling repeats rollout and selection until the
batch is full.

Numbers per token stay on the workers; the controller has a few numbers per response. If these are enough, the
controller computes the advantages, otherwise the workers do. Responses that are not used in the update need no forward
pass, unless the KL is part of the reward. The rows of an update are distributed so that the workers have about the same
work in every micro-batch. Policy filtration draws the rows of the updates after the advantages are computed.
Independent calls are started together: they run at the same time on different pools, and one after the other on the
same pool.

Legend: B responses (prompts x group size), P rows of a batch for the workers: the rows of these responses, and padding
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from rljob_api.v1alpha1.kl import Kl, KlControllerType
from rljob_api.v1alpha1.recipes import resolved_value
from rljob_api.v1alpha1.response_selection import PolicyFiltrationType
from rljob_api.v1alpha1.rollout_correction import OldLogprobs
from rljob_trainer.algorithms.advantage_registry import advantage_estimator
from rljob_trainer.algorithms.functions import in_step
from rljob_trainer.algorithms.interfaces import GREEDY_REWARDS, NAMED_REWARDS, ResponseInputs
from rljob_trainer.algorithms.kl import kl_in_reward, next_coefficient
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.dynamic_sampling import DynamicSampling
from rljob_trainer.controller.prompt_batches import sample_seeds
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.controller.rollout_phase import Requested, RolloutPhase
from rljob_trainer.controller.sampler import Ticket
from rljob_trainer.controller.step_plan import StepPlan
from rljob_trainer.controller.step_rows import StepRows, filtered_rows
from rljob_trainer.controller.token_recorder import TokenRecorder
from rljob_trainer.datasets.cursor import DrawnRow, PromptCursor
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.observability.metrics import ADVANTAGE_MEAN, DISTINCT_FRACTION, KL_COEFFICIENT, KL_LOSS, Metrics
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.workers.columns import (
    ADVANTAGES,
    GROUPS,
    IS_TRAINED,
    KL_SUMS,
    OLD_LOGPROBS,
    PASS_MICRO_BATCHES,
    REF_LOGPROBS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    RETURNS,
    REWARDS,
    ROLLOUT_LOGPROBS,
    SCORES,
    TOKENS,
    UPDATE_MICRO_BATCHES,
    VALUES,
)
from rljob_trainer.workers.protocols import ActorGroup, CriticGroup, PendingResult, ReferenceGroup

Result = TypeVar("Result")

TRAINING_STREAM = 0
"""The stream of `sample_seeds` for training."""
ENVIRONMENT_STREAM = 8
"""The stream for the environments of training."""
REPLACEMENT_STREAMS = (6, 7)
"""The streams for responses that replace excluded ones, one for each attempt."""
FORWARD_COLUMNS = (TOKENS, RESPONSE_MASK, IS_TRAINED, PASS_MICRO_BATCHES)
"""Columns that the forward passes for log-probabilities and values need."""
VALUE_COLUMNS = (TOKENS, RESPONSE_MASK, IS_TRAINED, UPDATE_MICRO_BATCHES, VALUES, RETURNS)
"""Columns that an update of the critic needs."""


class TrainingStep:
    """Runs training steps. `reference` and `critic` are None if nothing needs them. `cursor`, the prompt stream, is
    only required for dynamic sampling."""

    def __init__(
        self,
        plan: StepPlan,
        rollout: RolloutPhase,
        actor: ActorGroup,
        reference: ReferenceGroup | None,
        critic: CriticGroup | None,
        timer: PhaseTimer,
        cursor: PromptCursor[PromptRow] | None = None,
        recorder: TokenRecorder | None = None,
    ) -> None:
        self.plan = plan
        self.rollout = rollout
        self.actor = actor
        self.reference = reference
        self.critic = critic
        self.timer = timer
        self.recorder = recorder
        self.kl_coefficient = KlCoefficient(plan.algorithm.kl)
        self.advantages = advantage_estimator(plan.algorithm, plan.group_size)
        self.compares_by_name = NAMED_REWARDS in self.advantages.needs
        self.compares_groups = self.advantages.compares_groups and plan.group_size > 1
        self.min_members = 2 if self.compares_groups else 1
        """Number of responses that a group needs. A response that is left alone has no baseline."""
        self.dynamic_sampling: DynamicSampling | None = None
        if resolved_value(plan.algorithm.dynamic_sampling).enabled:
            assert cursor is not None, "dynamic sampling needs the prompt stream"
            self.dynamic_sampling = DynamicSampling(plan, cursor, by_name=self.compares_by_name)
        correction = plan.algorithm.rollout_correction
        self.takes_rollout_logprobs = correction.old_logprobs is OldLogprobs.ROLLOUT
        """Whether the rollout engine's log-probabilities are the old ones."""
        self.needs_old_logprobs = not plan.has_single_update or plan.has_dropout or correction.rejection is not None
        """Whether an update of the policy needs old log-probabilities from a separate forward pass."""
        in_reward = {OLD_LOGPROBS, REF_LOGPROBS} if plan.algorithm.kl.is_in_reward else set[str]()
        self.needed_by_advantages = self.advantages.needs | in_reward

    def run(self, prompts: Sequence[DrawnRow[PromptRow]], step: int) -> tuple[Rollout, dict[str, float]]:
        """Runs step `step` (from 0) on these prompts; dynamic sampling draws further ones. Returns everything that was
        generated, and the step's metrics."""
        with in_step(step):
            return self._run(prompts, step)

    def _run(self, prompts: Sequence[DrawnRow[PromptRow]], step: int) -> tuple[Rollout, dict[str, float]]:
        rows = self._generated(prompts, step)
        if rows.has_several_rows and VALUES in self.advantages.needs:
            raise ConfigurationError(
                f"spec.training.algorithm.advantage: {self.advantages.name} compares the values of successive tokens, "
                f"but responses of step {step + 1} have several rows of tokens ({len(rows.tokens_R)} rows, "
                f"{len(rows.num_rows_B)} responses); choose an advantage without a critic"
            )
        batch = self._with_forward_passes(rows.distributed_batch(), step)
        rows.rollout = self.rollout.scored(rows.rollout)
        batch, rows = rows.without_uncounted(batch, self.min_members)
        batch, of_advantages = self._with_advantages(batch, rows)
        batch, rows, of_filtration = self._filtered(batch, rows, step)
        metrics = self._updated(batch, rows, step) | of_advantages
        everything = rows.everything or rows.rollout
        return everything, {
            **everything.metrics(),
            **(everything.equal_scores_metrics(by_name=self.compares_by_name) if self.compares_groups else {}),
            **rows.sampling_metrics,
            **metrics,
            **of_filtration,
            **self._controlled_kl(metrics, rows, step),
            **rows.metrics(),
        }

    def _generated(self, prompts: Sequence[DrawnRow[PromptRow]], step: int) -> StepRows:
        """Generates the step's responses and selects the groups that are kept. If the responses or the selection depend
        on scores, this waits for them, so that dropped responses need no forward pass. Otherwise scoring continues in
        the background."""
        if self.dynamic_sampling is not None and self.dynamic_sampling.is_continuous:
            with self.timer.phase("rollout"):
                self.rollout.sampler.prepare(self.plan.sampling, syncs=self._syncs(step))
            return self.dynamic_sampling.filled_continuously(
                prompts, step, lambda fresh, num_drawn: self._requested(fresh, step, num_drawn), self.rollout
            )
        if self.dynamic_sampling is not None:
            return self.dynamic_sampling.filled(
                prompts, step, lambda fresh, num_drawn: self._scored_rollout(fresh, step, num_drawn)
            )
        drops_groups = self.plan.algorithm.drop_zero_variance_groups
        if drops_groups or self.plan.refills_groups:
            rollout = self._scored_rollout(prompts, step)
        else:
            rollout = self._begin_rollout(prompts, step)
        everything_B = torch.ones(len(rollout.prompts), dtype=torch.bool)
        is_kept_B = rollout.has_reward_variance(by_name=self.compares_by_name) if drops_groups else everything_B
        return StepRows.of(self.plan, rollout, is_kept_B)

    def _scored_rollout(self, prompts: Sequence[DrawnRow[PromptRow]], step: int, num_drawn: int = 0) -> Rollout:
        """Like `_begin_rollout`, and waits for the scores. If the job says so, generates responses that replace
        excluded ones, to the same prompts with other seeds."""
        rollout = self.rollout.scored(self._begin_rollout(prompts, step, num_drawn))
        first = num_drawn * self.plan.group_size
        for stream in REPLACEMENT_STREAMS if self.plan.refills_groups else ():
            rows = rollout.is_excluded_B.nonzero().flatten()
            if not len(rows):
                break
            seeds_B = sample_seeds(self.plan.seed, stream, step, first + len(rollout.prompts))[first:]
            others = self.rollout.begin(
                [rollout.prompts[row] for row in rows.tolist()],
                1,
                self.plan.sampling,
                seeds_B[rows],
                environment_seeds=self._environment_seeds(step, num_drawn, len(prompts))[rows // self.plan.group_size],
                syncs=self._syncs(step),
                with_greedy=rollout.greedy is not None,
            )
            rollout = rollout.with_replaced(rows, self.rollout.scored(others))
        return rollout

    def _begin_rollout(self, prompts: Sequence[DrawnRow[PromptRow]], step: int, num_drawn: int = 0) -> Rollout:
        """Generates responses to these prompts and starts their scoring. `num_drawn`: prompts drawn before in this
        step."""
        return self.rollout.begin(
            [each.row for each in prompts],
            self.plan.group_size,
            self.plan.sampling,
            self._seeds(step, num_drawn, len(prompts)),
            environment_seeds=self._environment_seeds(step, num_drawn, len(prompts)),
            syncs=self._syncs(step),
            with_greedy=GREEDY_REWARDS in self.advantages.needs,
            tickets=tickets_of(prompts, step, num_drawn),
        )

    def _requested(self, prompts: Sequence[DrawnRow[PromptRow]], step: int, num_drawn: int) -> Requested:
        """Requests responses to these prompts, like `_begin_rollout`, without waiting for them."""
        return self.rollout.request(
            [each.row for each in prompts],
            self.plan.group_size,
            self._seeds(step, num_drawn, len(prompts)),
            environment_seeds=self._environment_seeds(step, num_drawn, len(prompts)),
            tickets=tickets_of(prompts, step, num_drawn),
        )

    def _seeds(self, step: int, num_drawn: int, num_prompts: int) -> torch.Tensor:
        """Returns [B] int64. A prompt's seeds depend on its number in the step, not on the round in which it is
        drawn."""
        first, num_rows = num_drawn * self.plan.group_size, num_prompts * self.plan.group_size
        return sample_seeds(self.plan.seed, TRAINING_STREAM, step, first + num_rows)[first:]

    def _environment_seeds(self, step: int, num_drawn: int, num_prompts: int) -> torch.Tensor:
        """Returns one seed per prompt, int64, with the same property."""
        return sample_seeds(self.plan.seed, ENVIRONMENT_STREAM, step, num_drawn + num_prompts)[num_drawn:]

    def _syncs(self, step: int) -> bool:
        """Whether the rollout engines get new weights before this step."""
        return step % self.plan.sync_every_steps == 0

    def _with_forward_passes(self, batch: DataProto, step: int) -> DataProto:
        """Adds the required log-probabilities and values to the batch. During the critic's warm-up only those that
        advantages and rewards need are computed."""
        inputs, calls = batch.only(FORWARD_COLUMNS), dict[str, Callable[[], PendingResult[DataProto]]]()
        unplanned = inputs.without([PASS_MICRO_BATCHES])
        trains_actor = self.plan.trains_actor(step)
        if self.takes_rollout_logprobs:
            batch = batch.union(batch.only([ROLLOUT_LOGPROBS]).rename({ROLLOUT_LOGPROBS: OLD_LOGPROBS}))
        elif (trains_actor and self.needs_old_logprobs) or OLD_LOGPROBS in self.needed_by_advantages:
            calls["old_logprob"] = partial(self.actor.compute_logprobs, inputs)
        if self.reference is not None and (trains_actor or REF_LOGPROBS in self.needed_by_advantages):
            calls["ref"] = partial(
                self.reference.compute_ref_logprobs, inputs if self.plan.reference_follows_actor else unplanned
            )
        if self.critic is not None:
            calls["values"] = partial(
                self.critic.compute_values, inputs if self.plan.critic_follows_actor else unplanned
            )
        for found in self._results(calls):
            batch = batch.union(found)
        return batch

    def _with_advantages(self, batch: DataProto, rows: StepRows) -> tuple[DataProto, dict[str, float]]:
        """Adds the advantages to the batch, and marks the rows that are used in the update. Also returns metrics."""
        rollout = rows.rollout
        coefficient, metrics = self.kl_coefficient.value, dict[str, float]()
        kl_B = rows.sums(self._kl_for_reward(batch))
        batch = batch.with_columns({IS_TRAINED: rows.spread(rows.is_trained_B)})
        if self.advantages.for_responses is not None:
            rewards_B = kl_in_reward(rollout.rewards_B, kl_B, coefficient)
            advantages_B = torch.zeros_like(rewards_B)
            if rows.is_kept_B.any():
                inputs = self._inputs(rewards_B, rows)
                advantages_B[rows.is_kept_B] = self.advantages.for_responses(inputs).float()
            batch = batch.with_columns({ADVANTAGES: rows.spread(advantages_B)})
            if rows.has_trained_rows:
                metrics[ADVANTAGE_MEAN] = float(advantages_B[rows.is_trained_B].mean())
        else:
            columns_P = {REWARDS: rows.spread(rollout.rewards_B), GROUPS: rows.spread(rows.groups_B)}
            inputs_P = batch.without([TOKENS]).with_columns(columns_P)
            if rows.has_several_rows:
                found = self.actor.compute_token_advantages(rows.by_response(inputs_P), coefficient)
                batch = batch.union(rows.for_workers(found))
            else:
                batch = batch.union(self.actor.compute_token_advantages(inputs_P, coefficient))
        if self.plan.algorithm.kl.is_in_reward and rows.has_trained_rows:
            lengths_B = rollout.batch[RESPONSE_LENGTHS][rows.is_trained_B]
            metrics[KL_LOSS] = float(kl_B[rows.is_trained_B].sum() / lengths_B.sum())
        return batch, metrics

    def _inputs(self, rewards_B: torch.Tensor, rows: StepRows) -> ResponseInputs:
        """Returns the inputs of an advantage estimator that computes one number per response, only with the responses
        of the kept groups."""
        rollout, is_kept_B, greedy_B = rows.rollout, rows.is_kept_B, rows.rollout.greedy_rewards_B
        weights = {name: weight for name, weight in rollout.weights.items() if weight != 0}
        named = rollout.named_rewards_B if self.compares_by_name else {}
        return ResponseInputs(
            rewards_B[is_kept_B],
            rows.groups_B[is_kept_B],
            rollout.batch[RESPONSE_LENGTHS][is_kept_B],
            is_trained_B=rows.is_trained_B[is_kept_B],
            greedy_rewards_B=None if greedy_B is None else greedy_B[is_kept_B],
            named_rewards={name: named[name][is_kept_B] for name in weights if named},
            reward_weights=weights if named else {},
        )

    def _kl_for_reward(self, batch: DataProto) -> torch.Tensor:
        """Returns [P]: the KL of each row of the workers' batch; 0 if the job has no KL in the reward, and for rows
        without a forward pass."""
        if not self.plan.algorithm.kl.is_in_reward:
            return torch.zeros(len(batch))
        return self.actor.compute_kl_sums(batch.only([RESPONSE_MASK, IS_TRAINED, OLD_LOGPROBS, REF_LOGPROBS]))[KL_SUMS]

    def _filtered(self, batch: DataProto, rows: StepRows, step: int) -> tuple[DataProto, StepRows, dict[str, float]]:
        """Applies policy filtration, which draws responses of the batch by their scores, if the job sets it."""
        filtration, seed = self.plan.algorithm.policy_filtration, self.plan.seed
        if filtration.type is PolicyFiltrationType.NONE or not rows.has_trained_rows:
            return batch, rows, {}
        scores_B = rows.rollout.batch[SCORES]
        drawn_B = filtered_rows(filtration, scores_B, rows.groups_B, rows.is_trained_B, seed, step)
        trained_B = drawn_B[rows.is_trained_B]
        return *rows.with_responses_replaced(batch, drawn_B), {
            DISTINCT_FRACTION: len(set(trained_B.tolist())) / len(trained_B)
        }

    def _updated(self, batch: DataProto, rows: StepRows, step: int) -> dict[str, float]:
        """Updates critic and actor; returns the metrics of both."""
        calls = dict[str, Callable[[], PendingResult[Metrics]]]()
        if self.critic is not None:
            critics = rows.for_critic(batch.only(VALUE_COLUMNS))
            calls["update_critic"] = partial(self.critic.update_critic, critics, step)
        if self.plan.trains_actor(step):
            if self.recorder is not None:
                batch = self.recorder.with_recorded_rows(batch, rows)
            calls["update_actor"] = partial(self.actor.update_policy, batch, step, self.kl_coefficient.value)
        else:
            self.actor.skip_update(step)
        metrics: dict[str, float] = {}
        for found in self._results(calls):
            metrics.update(found)
        return metrics

    def _results(self, calls: Mapping[str, Callable[[], PendingResult[Result]]]) -> list[Result]:
        """Starts all calls, then waits for each in the timer phase of its name. The first phase includes the time of
        starting all of them."""
        pending: list[PendingResult[Result]] = []
        results: list[Result] = []
        for index, phase in enumerate(calls):
            with self.timer.phase(phase):
                pending = pending or [begin() for begin in calls.values()]
                results.append(pending[index].result())
        return results

    def _controlled_kl(self, metrics: Metrics, rows: StepRows, step: int) -> dict[str, float]:
        """Returns the step's KL coefficient as a metric, if there is a KL term, and computes the coefficient of the
        next step. If the policy was not updated, the coefficient stays the same, because then the measured KL is not
        its effect."""
        if not self.plan.algorithm.kl.coefficient:
            return {}
        used = self.kl_coefficient.value
        if KL_LOSS in metrics and self.plan.trains_actor(step):
            self.kl_coefficient.update_after_step(metrics[KL_LOSS], int(rows.is_trained_B.sum()))
        return {KL_COEFFICIENT: used}


def tickets_of(prompts: Sequence[DrawnRow[PromptRow]], step: int, num_drawn: int) -> list[Ticket]:
    """Returns the tickets of prompts that step `step` has drawn after `num_drawn` others."""
    return [Ticket(each.ordinal, step, number) for number, each in enumerate(prompts, num_drawn)]


class KlCoefficient:
    """The KL coefficient of the next step. With an adaptive KL controller it changes after each step."""

    def __init__(self, kl: Kl) -> None:
        self.kl = kl
        self.value = kl.coefficient

    def state(self) -> float | None:
        """Returns the value for a checkpoint; None for a fixed coefficient."""
        return None if self.kl.controller.type is KlControllerType.FIXED else self.value

    def restore(self, saved: float | None) -> None:
        """Restores the value of a checkpoint. None, from a run with a fixed coefficient, changes nothing. The value is
        ignored if the job now has a fixed coefficient."""
        if saved is not None and self.state() is not None:
            self.value = saved

    def update_after_step(self, measured: float, num_trained: int) -> None:
        """Updates the coefficient after a step that trained the policy on `num_trained` responses with a mean KL per
        token of `measured`."""
        self.value = next_coefficient(self.kl.controller, self.value, measured, num_trained)
