"""The rollout phase of a step: from prompts to scored responses. `begin` generates the responses and starts their
scoring; `scored` waits for the scores. In between, the workers are free for other calls.

The responses stay on the workers that generated them; the controller gets one number per response.

Legend: B responses (prompts x group size), S scored responses: B, then one greedy response per prompt if requested.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rljob_trainer.algorithms.advantages import zero_variance_mask
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.controller.balanced_order import balanced_order
from rljob_trainer.controller.outcomes import (
    Reasons,
    is_without_score,
    outcome_metrics,
    outcome_of,
    reasons_of,
    refuse_not_finite,
    reward_metrics,
    statuses_of,
)
from rljob_trainer.controller.stop_request import StepAbandonedError, StopRequest
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.errors import RewardError
from rljob_trainer.groups.object_store import stored
from rljob_trainer.observability.metrics import (
    PROMPT_LENGTH_MAX,
    PROMPT_LENGTH_MEAN,
    RESPONSE_CLIP_RATIO,
    RESPONSE_LENGTH_PREFIX,
    REWARD_PREFIX,
    spread,
)
from rljob_trainer.observability.samples import Sample, SampleKind
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.workers.columns import (
    ANSWERS,
    DATASET_ROWS,
    FOUND,
    IS_GREEDY,
    IS_TRUNCATED,
    PLAIN_TURN_BEGINNINGS,
    PROMPT_MESSAGES,
    PROMPT_TEXTS,
    PROMPT_TOKEN_IDS,
    RESPONSE_LENGTHS,
    RESPONSE_TEXTS,
    SAMPLE_IDS,
    SAMPLE_SEEDS,
    SCORES,
    TURN_BEGINNINGS,
    score_column,
)
from rljob_trainer.workers.protocols import HybridGroup, PendingResult, RewardGroup, RewardModelGroup

MAX_SEED = 2**31
"""Upper bound of seeds (exclusive)."""
REWARD_COLUMNS = (PROMPT_TEXTS, TURN_BEGINNINGS, ANSWERS, DATASET_ROWS)
MODEL_COLUMNS = (PROMPT_TEXTS, PROMPT_MESSAGES, PLAIN_TURN_BEGINNINGS)
"""Prompt columns that reward functions (REWARD_COLUMNS) and a reward model (MODEL_COLUMNS) need."""


@dataclass(frozen=True)
class RewardModelWorkers:
    """The reward model's worker group."""

    group: RewardModelGroup
    columns: Sequence[str]
    """The columns that the reward model reads."""
    num_data_ranks: int
    """Number of parts that its batches are split into."""


@dataclass(frozen=True)
class Scoring:
    """Pending scores of a rollout."""

    started: PendingResult[DataProto]
    """The call that started the reward functions."""
    samples: list[DataProto]
    """SAMPLE_IDS of the responses that each rank of the reward workers scores, in the order of the rollout's rows."""
    by_model: PendingResult[DataProto] | None = None
    """Scores of the reward model, if there is one."""
    order_S: torch.Tensor | None = None
    """int64: order of the rows in the reward model's call; None: not reordered."""


@dataclass(frozen=True)
class Rollout:
    """The responses of a rollout, and their scores once they are computed. Row i of all parts is the same response."""

    prompts: tuple[PromptRow, ...]
    """The prompt of each response."""
    groups_B: torch.Tensor
    """int64: the number of each response's group in its step. The responses to one prompt are a group."""
    batch: DataProto
    """Columns of a rollout (see workers/columns) and scores. Only columns with one number per response are local."""
    weights: Mapping[str, float]
    """Weights of the rewards, by name."""
    scoring: Scoring | None = None
    """The pending scores: one per row, then one per greedy response if greedy responses were requested. None once the
    scores are in `batch`. The properties and methods below that read scores need them in `batch`."""
    greedy: DataProto | None = None
    """SCORES and what the rewards returned, for the greedy response to each row's prompt; None if there are no greedy
    responses."""

    @property
    def lengths_B(self) -> torch.Tensor:
        """[B] int64: tokens of prompt and response."""
        prompts_B = torch.tensor([len(prompt.token_ids) for prompt in self.prompts], dtype=torch.int64)
        return prompts_B + self.batch[RESPONSE_LENGTHS]

    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return int(self.lengths_B.sum())

    @property
    def rewards_B(self) -> torch.Tensor:
        """[B] float32: the weighted sums of the rewards; NaN for a response without a score."""
        return self.batch[SCORES].float()

    @property
    def named_rewards_B(self) -> dict[str, torch.Tensor]:
        """[B] float32 each: the rewards by name, without their weights; NaN for a response without a score from this
        reward."""
        return {name: self.batch[score_column(name)].float() for name in self.weights}

    @property
    def greedy_rewards_B(self) -> torch.Tensor | None:
        """[B] float32: `rewards_B` of the greedy response to the row's prompt; None if there are no greedy
        responses."""
        return None if self.greedy is None else self.greedy[SCORES].float()

    @property
    def is_excluded_B(self) -> torch.Tensor:
        """[B] bool: whether a reward with a weight other than 0 gave no score, to the response or to the greedy
        response that it is compared with."""
        parts = [self.batch] if self.greedy is None else [self.batch, self.greedy]
        return torch.stack([is_without_score(part, self.weights) for part in parts]).any(dim=0)

    def reasons(self) -> Reasons:
        """Returns why responses are excluded."""
        of_greedy = Reasons() if self.greedy is None else reasons_of(self.greedy, self.weights)
        return reasons_of(self.batch, self.weights) + of_greedy

    def is_counted(self, min_members: int) -> torch.Tensor:
        """Returns [B] bool: whether the response counts for the advantages of its group. It is not excluded, and its
        group has at least `min_members` (1 or more) responses that are not.

        This decides what happens to a group that lost members: it trains on the others."""
        is_scored_B = ~self.is_excluded_B
        _, index_B, sizes_G = torch.unique(self.groups_B, return_inverse=True, return_counts=True)
        num_scored_G = torch.zeros_like(sizes_G).index_add_(0, index_B, is_scored_B.to(sizes_G.dtype))
        return is_scored_B & (num_scored_G >= min_members)[index_B]

    def has_reward_variance(self, *, by_name: bool) -> torch.Tensor:
        """Returns [B] bool: whether the response counts in its group (`is_counted`) and the rewards of these responses
        differ. With `by_name` each reward is compared separately, except those with weight 0; then it is enough if one
        of them differs. Advantages that compare each reward separately need this."""
        named = [each_B for name, each_B in self.named_rewards_B.items() if self.weights[name] != 0]
        differs_B = torch.zeros(len(self.groups_B), dtype=torch.bool)
        for each_B in named if by_name else [self.rewards_B]:
            differs_B = differs_B | self.differs(each_B)
        return differs_B

    def differs(self, values_B: torch.Tensor) -> torch.Tensor:
        """Returns [B] bool: whether the response has a value and counts in its group, and the values of these responses
        differ."""
        is_compared_B = self.is_counted(2) & ~values_B.isnan()
        differs_B = torch.zeros_like(is_compared_B)
        values_S, groups_S = values_B[is_compared_B], self.groups_B[is_compared_B]
        _, index_S, sizes_G = torch.unique(groups_S, return_inverse=True, return_counts=True)
        differs_B[is_compared_B] = ~zero_variance_mask(values_S, groups_S) & (sizes_G > 1)[index_S]
        return differs_B

    def metrics(self) -> dict[str, float]:
        """Returns metrics: rewards in total and by name, lengths, outcomes, and error rates of the rewards."""
        num_rows, is_excluded_B = len(self.prompts), self.is_excluded_B
        return {
            **spread(REWARD_PREFIX, self.rewards_B[~is_without_score(self.batch, self.weights)].tolist()),
            **spread(RESPONSE_LENGTH_PREFIX, self.batch[RESPONSE_LENGTHS].double().tolist()),
            RESPONSE_CLIP_RATIO: float(self.batch[IS_TRUNCATED].float().mean()),
            PROMPT_LENGTH_MEAN: sum(len(prompt.token_ids) for prompt in self.prompts) / num_rows,
            PROMPT_LENGTH_MAX: float(max(len(prompt.token_ids) for prompt in self.prompts)),
            **reward_metrics(self.batch, self.weights),
            **outcome_metrics(self.batch, is_excluded_B),
        }


class RolloutPhase:
    """Generates and scores responses. `weights`: weights of the rewards, by name. `num_ranks`: ranks of `reward`."""

    def __init__(
        self,
        hybrid: HybridGroup,
        reward: RewardGroup,
        weights: Mapping[str, float],
        timer: PhaseTimer,
        stop: StopRequest,
        reward_model: RewardModelWorkers | None = None,
        num_ranks: int = 1,
    ) -> None:
        self.hybrid = hybrid
        self.reward = reward
        self.reward_model = reward_model
        self.weights = weights
        self.timer = timer
        self.stop = stop
        self.num_ranks = num_ranks
        self.num_samples = 0
        """Number of responses requested so far."""

    def run(
        self, prompts: Sequence[PromptRow], num_responses: int, sampling: SamplingSettings, seeds: torch.Tensor
    ) -> Rollout:
        """Calls `begin` and then `scored`, if there is nothing else to do in between."""
        return self.scored(self.begin(prompts, num_responses, sampling, seeds))

    def begin(
        self,
        prompts: Sequence[PromptRow],
        num_responses: int,
        sampling: SamplingSettings,
        seeds: torch.Tensor,
        *,
        syncs: bool = True,
        with_greedy: bool = False,
        first_group: int = 0,
    ) -> Rollout:
        """Generates `num_responses` responses to each prompt and starts their scoring. Responses to the same prompt are
        consecutive rows.

        `seeds`: [B] int64. `syncs`: whether the rollout engine first gets the current weights. `with_greedy`: also
        generates one greedy response per prompt, and keeps only its score. `first_group`: the group number of the first
        prompt."""
        one_row_per_prompt = stored(prompt_batch(prompts))
        inputs = one_row_per_prompt.repeat(num_responses)
        columns = {SAMPLE_SEEDS: seeds}
        if with_greedy:
            inputs = DataProto.concat([inputs, one_row_per_prompt])
            is_greedy_S = torch.arange(len(inputs)) >= len(seeds)
            columns = {SAMPLE_SEEDS: seeds.new_zeros(len(inputs)), IS_GREEDY: is_greedy_S}
            columns[SAMPLE_SEEDS][: len(seeds)] = seeds
        columns[SAMPLE_IDS] = torch.arange(self.num_samples, self.num_samples + len(inputs))
        self.num_samples += len(inputs)
        request = inputs.only([PROMPT_TOKEN_IDS]).with_columns(columns)
        with self.timer.phase("rollout"):
            batch = self.hybrid.generate_sequences(request, sampling, syncs)
        batch = batch.with_columns({SAMPLE_IDS: columns[SAMPLE_IDS]})
        with self.timer.phase("reward"):
            scoring = self._scoring(batch.union(inputs.only({*REWARD_COLUMNS, *MODEL_COLUMNS})))
        repeated = tuple(prompt for prompt in prompts for _ in range(num_responses))
        groups_B = torch.arange(first_group, first_group + len(prompts)).repeat_interleave(num_responses)
        sampled = batch.slice(0, len(repeated)) if with_greedy else batch
        return Rollout(repeated, groups_B, sampled, self.weights, scoring)

    def _scoring(self, batch: DataProto) -> Scoring:
        """Starts the scoring of these responses, and returns the pending scores. Also starts the call of the reward
        model, if there is one, with rows ordered so that each of its workers gets about the same number of tokens."""
        parts = equal_parts(batch.only((SAMPLE_IDS, RESPONSE_TEXTS, RESPONSE_LENGTHS, *REWARD_COLUMNS)), self.num_ranks)
        samples = [part.only([SAMPLE_IDS]) for part in parts]
        started = self.reward.start_scoring(parts)
        if self.reward_model is None:
            return Scoring(started, samples)
        order_S = None
        num_ranks = self.reward_model.num_data_ranks
        if num_ranks > 1 and len(batch) % num_ranks == 0:
            order_S = balanced_order(batch[RESPONSE_LENGTHS], num_ranks)
            batch = batch.reorder(order_S)
        by_model = self.reward_model.group.compute_scores(batch.only(self.reward_model.columns))
        return Scoring(started, samples, by_model, order_S)

    def scored(self, rollout: Rollout) -> Rollout:
        """Waits for the scores and returns the rollout with them. A rollout that already has its scores is returned
        unchanged.

        Raises RewardError if a reward fails and its `onError` is `Fail`, and for a score that is not finite;
        StepAbandonedError if a stop was requested in the meantime."""
        if rollout.scoring is None:
            return rollout
        with self.timer.phase("reward"):
            scores = self._scores(rollout.scoring)
        totals_S = torch.zeros(len(scores), dtype=torch.float64)
        for name, weight in self.weights.items():
            # A missing score is NaN, which would remain NaN with weight 0.
            if weight != 0:
                totals_S += weight * scores[score_column(name)]
        refuse_not_finite(rollout.prompts, self.weights, scores, totals_S)
        num_rows, greedy = len(rollout.prompts), None
        totals_B = totals_S[:num_rows]
        if len(scores) > num_rows:
            num_prompts = len(scores) - num_rows
            greedy = scores.with_columns({SCORES: totals_S}).slice(num_rows, len(scores))
            greedy = greedy.repeat(num_rows // num_prompts)
            scores = scores.slice(0, num_rows)
        batch = rollout.batch.union(scores).with_columns({SCORES: totals_B})
        return replace(rollout, batch=batch, scoring=None, greedy=greedy)

    def samples(self, rollout: Rollout, step: int, kind: SampleKind, max_samples: int | None = None) -> list[Sample]:
        """Returns one sample per response, or only for the first `max_samples`, with the texts that the rewards have
        read. Only the texts of these responses are sent to the controller."""
        prompts = rollout.prompts[:max_samples]
        picked = self.reward.response_texts(rollout.batch.slice(0, len(prompts)).only([RESPONSE_TEXTS, FOUND]))
        texts, found = picked.object_column(RESPONSE_TEXTS), picked.object_column(FOUND)
        scores = _or_none(rollout.batch[SCORES])
        by_name = {name: _or_none(rollout.batch[score_column(name)]) for name in rollout.weights}
        statuses = statuses_of(rollout.batch, rollout.weights)
        are_truncated = rollout.batch[IS_TRUNCATED].tolist()
        return [
            Sample(
                step,
                kind,
                prompt.text_for_rewards,
                f"{prompt.turn_beginning}{text}",
                str(prompt.answer),
                scores[index],
                {name: named[index] for name, named in by_name.items()},
                _by_reward(found[index]),
                outcome_of(is_truncated=are_truncated[index]),
                {name: named[index] for name, named in statuses.items()},
            )
            for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        ]

    def _scores(self, scoring: Scoring) -> DataProto:
        """Waits for the scores. Raises StepAbandonedError after a stop request, because the scores may be wrong then:
        the stop signal may also have reached processes that a reward had started."""
        try:
            scoring.started.result()
            scores = self.reward.finish_scoring(scoring.samples)
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


def equal_parts(batch: DataProto, num_parts: int) -> list[DataProto]:
    """Splits a batch into consecutive parts of the same number of rows; the last parts may have fewer rows or none."""
    size = -(-len(batch) // num_parts)
    return [batch.slice(min(part * size, len(batch)), min((part + 1) * size, len(batch))) for part in range(num_parts)]


def _by_reward(found: object) -> dict[str, str]:
    assert isinstance(found, Mapping), "a row of FOUND"
    return {str(name): str(text) for name, text in found.items()}


def _or_none(values_B: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values_B.tolist()]


def prompt_batch(prompts: Sequence[PromptRow]) -> DataProto:
    """Returns the prompts as a batch for the workers."""
    return DataProto(
        ragged={PROMPT_TOKEN_IDS: RaggedColumn.from_rows([row.token_ids for row in prompts], torch.int64)},
        objects={
            PROMPT_TEXTS: tuple(row.text_for_rewards for row in prompts),
            TURN_BEGINNINGS: tuple(row.turn_beginning for row in prompts),
            PLAIN_TURN_BEGINNINGS: tuple(row.plain_turn_beginning for row in prompts),
            ANSWERS: tuple(row.answer for row in prompts),
            DATASET_ROWS: tuple(row.row for row in prompts),
            PROMPT_MESSAGES: tuple(row.messages for row in prompts),
        },
    )


def sample_seeds(job_seed: int, stream: int, step: int, count: int) -> torch.Tensor:
    """Returns [count] int64 seeds that depend only on the arguments, so that a resumed run draws the same ones.

    `stream` is a different number for each use, such as training and evaluation."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([job_seed, stream, step])))
    return torch.from_numpy(generator.integers(0, MAX_SEED, size=count, dtype=np.int64))
