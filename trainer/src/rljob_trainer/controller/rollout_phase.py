"""The rollout phase of a step: from prompts to scored responses. `begin` generates the responses, each of which is
scored as soon as it has finished; `scored` waits for the last scores. In between, the workers are free for other calls.

The tokens and texts stay on the workers that generated them; the controller gets only columns with one number per
response, such as lengths and scores.

Legend: B responses (prompts x group size), S scored responses: B, then one greedy response per prompt if requested.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.balanced_order import balanced_order
from rljob_trainer.controller.finished_groups import FinishedGroups
from rljob_trainer.controller.outcomes import (
    refuse_not_finite,
    rewards_of_rows,
    statuses_of,
    weighted_sum,
    without_scores_of,
)
from rljob_trainer.controller.prompt_batches import environment_prompt_batch, prompt_batch
from rljob_trainer.controller.rollout import ROW_COLUMNS, Rollout, Scoring, one_row_per_response
from rljob_trainer.controller.sampler import Sampler, Ticket
from rljob_trainer.controller.stop_request import StepAbandonedError, StopRequest
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.errors import RewardError
from rljob_trainer.groups.object_store import stored
from rljob_trainer.observability.samples import Sample, SampleKind
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.workers.columns import (
    ENVIRONMENT_SEEDS,
    FOUND,
    IS_GREEDY,
    IS_LOST,
    MESSAGES,
    NUM_ROWS,
    OUTCOME_LIST,
    OUTCOMES,
    PLAIN_TURN_BEGINNINGS,
    PROMPT_MESSAGES,
    PROMPT_TEXTS,
    RESPONSE_LENGTHS,
    RESPONSE_TEXTS,
    SAMPLE_IDS,
    SAMPLE_SEEDS,
    SCORED_BY,
    SCORES,
    TURN_BEGINNINGS,
    score_column,
)
from rljob_trainer.workers.protocols import RewardModelGroup

PROMPTS_PER_OBJECT = 8
"""Prompts that are stored together. A worker that scores some responses reads the objects with their prompts whole."""
SAMPLE_COLUMNS = (RESPONSE_TEXTS, FOUND, PROMPT_TEXTS, TURN_BEGINNINGS, MESSAGES)
"""Columns of samples; the last three only in jobs with an environment, where the workers make the prompts."""
MODEL_COLUMNS = (PROMPT_TEXTS, PROMPT_MESSAGES, PLAIN_TURN_BEGINNINGS)
"""Prompt columns that a reward model needs."""


@dataclass(frozen=True)
class RewardModelWorkers:
    """The reward model's worker group."""

    reward: str
    """The reward's name."""
    group: RewardModelGroup
    columns: Sequence[str]
    """The columns that the reward model reads."""
    num_data_ranks: int
    """Number of parts that its batches are split into."""


@dataclass(frozen=True)
class Requested:
    """Responses that were requested. Greedy responses come after the others."""

    prompts: tuple[PromptRow, ...]
    """The prompt of each response that is not greedy."""
    groups_S: torch.Tensor
    """int64: the group of each response; see `Rollout.groups_B`."""
    ids_S: torch.Tensor
    """int64: SAMPLE_IDS."""
    inputs: DataProto
    """MODEL_COLUMNS of their prompts."""
    weights: Mapping[str, float]
    """Weights of the rewards that score them, by name."""

    def by_group(self) -> dict[int, Requested]:
        """Returns the responses of each group."""
        found = {}
        for group in sorted(set(self.groups_S.tolist())):
            rows = (self.groups_S == group).nonzero().flatten()
            prompts = tuple(self.prompts[row] for row in rows.tolist() if row < len(self.prompts))
            inputs = self.inputs.rows(rows)
            found[group] = Requested(prompts, self.groups_S[rows], self.ids_S[rows], inputs, self.weights)
        return found


class RolloutPhase:
    """Generates and scores responses. `weights`: weights of the rewards, by name."""

    def __init__(
        self,
        sampler: Sampler,
        weights: Mapping[str, float],
        timer: PhaseTimer,
        stop: StopRequest,
        reward_model: RewardModelWorkers | None = None,
        finished_groups: FinishedGroups | None = None,
        *,
        has_environment: bool = False,
        names_rewards: bool = False,
    ) -> None:
        """`finished_groups`: None if a stop does not keep finished groups. `has_environment`: whether the workers hold
        conversations with an environment. `names_rewards`: whether a dataset of the job names its rewards."""
        self.names_rewards = names_rewards
        self.sampler = sampler
        self.has_environment = has_environment
        self.finished_groups = finished_groups
        self._uncollected: dict[Ticket, tuple[PromptRow, torch.Tensor]] = {}
        """Prompt and SAMPLE_IDS of each group of training responses that was not collected."""
        self.reward_model = reward_model
        self.weights = weights
        self.timer = timer
        self.stop = stop

    def run(
        self,
        prompts: Sequence[PromptRow],
        num_responses: int,
        sampling: SamplingSettings,
        seeds: torch.Tensor,
        environment_seeds: torch.Tensor | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> Rollout:
        """Calls `begin` and then `scored`, for callers that have nothing else to do in between."""
        begun = self.begin(
            prompts, num_responses, sampling, seeds, environment_seeds=environment_seeds, weights=weights
        )
        return self.scored(begun)

    def begin(
        self,
        prompts: Sequence[PromptRow],
        num_responses: int,
        sampling: SamplingSettings,
        seeds: torch.Tensor,
        *,
        syncs: bool = True,
        environment_seeds: torch.Tensor | None = None,
        with_greedy: bool = False,
        tickets: Sequence[Ticket] = (),
        weights: Mapping[str, float] | None = None,
    ) -> Rollout:
        """Generates `num_responses` responses to each prompt and starts their scoring. Responses to the same prompt are
        consecutive rows.

        `seeds`: [B] int64. `syncs`: whether the rollout engine first gets the current weights. `environment_seeds`: one
        int64 per prompt, in a job with an environment. `with_greedy`: also generates one greedy response per prompt,
        and keeps only its score. `tickets`: one per prompt in training. `weights`: the rewards that score the
        responses; those of the training if None."""
        with self.timer.phase("rollout"):
            self.sampler.prepare(sampling, syncs=syncs)
            requested = self.request(
                prompts,
                num_responses,
                seeds,
                environment_seeds=environment_seeds,
                with_greedy=with_greedy,
                tickets=tickets,
                weights=weights,
            )
            with self._keeping_on_stop():
                self.sampler.drain()
        with self.timer.phase("reward"):
            return self.collected(requested)

    def request(
        self,
        prompts: Sequence[PromptRow],
        num_responses: int,
        seeds: torch.Tensor,
        *,
        environment_seeds: torch.Tensor | None = None,
        with_greedy: bool = False,
        tickets: Sequence[Ticket] = (),
        weights: Mapping[str, float] | None = None,
    ) -> Requested:
        """Requests responses; see `begin`, without waiting for them. Call `sampler.prepare` before."""
        make_batch = environment_prompt_batch if self.has_environment else prompt_batch
        parts = [prompts[first : first + PROMPTS_PER_OBJECT] for first in range(0, len(prompts), PROMPTS_PER_OBJECT)]
        one_row_per_prompt = DataProto.concat([stored(make_batch(part)) for part in parts])
        if self.has_environment:
            assert environment_seeds is not None, "each environment needs a seed"
            one_row_per_prompt = one_row_per_prompt.with_columns({ENVIRONMENT_SEEDS: environment_seeds})
        if weights is not None or self.names_rewards:
            every = self.weights if weights is None else weights
            names = tuple(" ".join(prompt.rewards or every) for prompt in prompts)
            one_row_per_prompt = one_row_per_prompt.with_columns(objects={SCORED_BY: names})
        inputs = one_row_per_prompt.repeat(num_responses)
        columns = {SAMPLE_SEEDS: seeds}
        if with_greedy:
            inputs = DataProto.concat([inputs, one_row_per_prompt])
            is_greedy_S = torch.arange(len(inputs)) >= len(seeds)
            columns = {SAMPLE_SEEDS: seeds.new_zeros(len(inputs)), IS_GREEDY: is_greedy_S}
            columns[SAMPLE_SEEDS][: len(seeds)] = seeds
        finished: list[tuple[int, DataProto]] = []
        for number, (ticket, prompt) in enumerate(zip(tickets, prompts, strict=bool(tickets))):
            if self.finished_groups is not None and (rows := self.finished_groups.take(ticket, prompt)) is not None:
                finished.append((number * num_responses, stored(rows)))
        groups_G = torch.tensor([ticket.number for ticket in tickets] or range(len(prompts)))
        groups_S = torch.cat([groups_G.repeat_interleave(num_responses), groups_G[: len(prompts) * with_greedy]])
        ids_S = self.sampler.submit(inputs.with_columns(columns), finished, groups_S)
        ids_GN = ids_S[: len(prompts) * num_responses].view(-1, num_responses)
        self._uncollected |= dict(zip(tickets, zip(prompts, ids_GN, strict=True), strict=bool(tickets)))
        repeated = tuple(prompt for prompt in prompts for _ in range(num_responses))
        of_model = inputs.only([name for name in MODEL_COLUMNS if name in inputs])
        return Requested(repeated, groups_S, ids_S, of_model, self.weights if weights is None else weights)

    def poll(self, requested: Mapping[int, Requested]) -> list[int]:
        """Waits a moment for responses or scores. Returns the numbers of the groups whose scores are complete. Raises
        StepAbandonedError."""
        with self.timer.phase("rollout"), self._keeping_on_stop():
            if self.sampler.num_in_flight:
                self.sampler.poll()
            self.sampler.poll_scores()
        return [number for number, each in requested.items() if self.sampler.are_scored(each.ids_S)]

    def collected(self, requested: Requested) -> Rollout:
        """Returns the rollout of responses that have all finished. Its scores are pending."""
        rows = self.sampler.take_rows(requested.ids_S)
        self._keep(rows)
        batch = one_row_per_response(rows)
        inputs = requested.inputs
        # The environment's messages belong to the prompt, so the worker returns the prompts of conversations.
        inputs = inputs.without([name for name in inputs.column_names() if name in batch])
        scoring = self._scoring(requested, batch.union(inputs))
        num_responses = len(requested.prompts)
        batch = batch.slice(0, num_responses)
        return Rollout(
            requested.prompts,
            requested.groups_S[:num_responses],
            batch.without(ROW_COLUMNS),
            rows.only(ROW_COLUMNS).slice(0, int(batch[NUM_ROWS].sum())),
            requested.weights,
            scoring,
        )

    def _scoring(self, requested: Requested, batch: DataProto) -> Scoring:
        """Returns the pending scores. Also starts the call of the reward model, if there is one, with rows ordered so
        that each of its workers gets about the same number of tokens."""
        ids_S = requested.ids_S
        if self.reward_model is None or self.reward_model.reward not in requested.weights:
            return Scoring(ids_S, batch[IS_LOST])
        order_S, is_lost_S = None, batch[IS_LOST]
        num_ranks = self.reward_model.num_data_ranks
        if num_ranks > 1 and len(batch) % num_ranks == 0:
            order_S = balanced_order(batch[RESPONSE_LENGTHS], num_ranks)
            batch = batch.reorder(order_S)
        by_model = self.reward_model.group.compute_scores(batch.only(self.reward_model.columns))
        return Scoring(ids_S, is_lost_S, by_model, order_S)

    def scored(self, rollout: Rollout) -> Rollout:
        """Waits for the scores and returns the rollout with them. A rollout that already has its scores is returned
        unchanged.

        Raises RewardError if a reward fails and its `onError` is `Fail`, and for a score that is not finite;
        StepAbandonedError if a stop was requested in the meantime."""
        if rollout.scoring is None:
            return rollout
        with self.timer.phase("reward"), self._keeping_on_stop():
            scores = self._scores(rollout.scoring)
        scored_by_S = rewards_of_rows(rollout.prompts, len(scores)) if self.names_rewards else ()
        scores = without_scores_of(scores, rollout.scoring.is_lost_S, rollout.weights, scored_by_S)
        totals_S = weighted_sum(scores, rollout.weights)
        refuse_not_finite(rollout.prompts, rollout.weights, scores, totals_S, [*self.weights])
        num_rows, greedy = len(rollout.prompts), None
        totals_B = totals_S[:num_rows]
        if len(scores) > num_rows:
            num_prompts = len(scores) - num_rows
            greedy = scores.with_columns({SCORES: totals_S}).slice(num_rows, len(scores))
            greedy = greedy.repeat(num_rows // num_prompts)
            scores = scores.slice(0, num_rows)
        batch = rollout.batch.union(scores).with_columns({SCORES: totals_B})
        return replace(rollout, batch=batch, scoring=None, greedy=greedy)

    def abandon(self) -> None:
        """Drops responses and scores that were not collected."""
        self.sampler.abandon()
        self._uncollected.clear()

    @contextmanager
    def _keeping_on_stop(self) -> Iterator[None]:
        """If a stop interrupts the block, adds the groups whose responses have all finished to `finished_groups`, and
        drops all other responses."""
        try:
            yield
        except StepAbandonedError:
            finished = [ids_N for _, ids_N in self._uncollected.values() if self.sampler.are_finished(ids_N)]
            if finished and self.finished_groups is not None:
                self._keep(self.sampler.take_rows(torch.cat(finished)))
            self.abandon()
            raise

    def _keep(self, batch: DataProto) -> None:
        """Adds the groups of training responses that are complete in this batch to `finished_groups`. A group with a
        response that an engine did not complete is not added."""
        rows_of: dict[int, list[int]] = {}
        for row, sample_id in enumerate(batch[SAMPLE_IDS].tolist()):
            rows_of.setdefault(sample_id, []).append(row)
        for ticket, (prompt, ids_N) in list(self._uncollected.items()):
            if rows_of.keys() >= set(ids_N.tolist()):
                del self._uncollected[ticket]
                group = batch.rows([row for sample_id in ids_N.tolist() for row in rows_of[sample_id]])
                if self.finished_groups is not None and not group[IS_LOST].any():
                    self.finished_groups.add(ticket, prompt, group)

    def samples(self, rollout: Rollout, step: int, kind: SampleKind) -> list[Sample]:
        """Returns one sample per response, with the texts that the rewards have read. Only these texts are sent to the
        controller."""
        prompts, rows = rollout.prompts, rollout.batch
        columns = [name for name in SAMPLE_COLUMNS if name in rows]
        picked = self.sampler.reward.response_texts(rows.only(columns))
        texts, found = picked.object_column(RESPONSE_TEXTS), picked.object_column(FOUND)
        prompt_texts = [prompt.text_for_rewards for prompt in prompts]
        beginnings = [prompt.turn_beginning for prompt in prompts]
        messages: Sequence[object] = [None] * len(prompts)
        if self.has_environment:
            prompt_texts = [str(text) for text in picked.object_column(PROMPT_TEXTS)]
            beginnings = [str(text) for text in picked.object_column(TURN_BEGINNINGS)]
            messages = picked.object_column(MESSAGES)
        scores = _or_none(rollout.batch[SCORES])
        by_name = {name: _or_none(rollout.batch[score_column(name)]) for name in rollout.weights}
        statuses = statuses_of(rollout.batch, rollout.weights)
        outcomes = [OUTCOME_LIST[number] for number in rollout.batch[OUTCOMES].tolist()]
        groups: list[int] = rollout.groups_B.tolist()
        return [
            Sample(
                step,
                kind,
                groups[index],
                prompt_texts[index],
                f"{beginnings[index]}{text}",
                "" if prompt.answer is None else str(prompt.answer),
                scores[index],
                {name: named[index] for name, named in by_name.items()},
                _by_reward(found[index]),
                outcomes[index],
                {name: named[index] for name, named in statuses.items()},
                _message_tuple(messages[index]),
                source="/".join(filter(None, (prompt.dataset, prompt.source))),
            )
            for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        ]

    def _scores(self, scoring: Scoring) -> DataProto:
        """Waits for the scores. Raises StepAbandonedError after a stop request, because the scores may be wrong then:
        the stop signal may also have reached processes that a reward had started."""
        try:
            # One call that waits for all of them would delay the stop until slow rewards have ended.
            while not self.sampler.are_scored(scoring.ids_S):
                self.sampler.poll_scores()
            scores = self.sampler.finish_scoring(scoring.ids_S)
        except RewardError as error:
            if self.stop.is_requested:
                raise StepAbandonedError from error
            raise
        if self.stop.is_requested:
            raise StepAbandonedError
        if scoring.by_model is None:
            return scores
        by_model = scoring.by_model.result()
        return scores.union(by_model if scoring.order_S is None else by_model.reorder(scoring.order_S.argsort()))


def _by_reward(found: object) -> dict[str, str]:
    assert isinstance(found, Mapping), "a row of FOUND"
    return {str(name): str(text) for name, text in found.items()}


def _or_none(values_B: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values_B.tolist()]


def _message_tuple(messages: object) -> tuple[Mapping[str, object], ...]:
    """The messages of a conversation; none for a single response."""
    if messages is None:
        return ()
    assert isinstance(messages, Sequence), "a row of MESSAGES"
    return tuple(messages)
