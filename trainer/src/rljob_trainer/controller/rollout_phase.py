"""From prompts to scored responses: one call of the rollout engine, and two of the rewards, which begin and end their
scoring. Others may use the workers between these two.

The responses stay with the workers that made them; what comes here is one number per response.

Legend: B responses (prompts x group size).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rljob_trainer.algorithms.advantages import zero_variance_mask
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.controller.balanced_order import balanced_order
from rljob_trainer.controller.stop_request import StepAbandonedError, StopRequest
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.errors import RewardError
from rljob_trainer.groups.object_store import stored
from rljob_trainer.observability.metrics import (
    ERROR_RATE,
    NAMED_REWARD_PREFIX,
    PROMPT_LENGTH_MAX,
    PROMPT_LENGTH_MEAN,
    RESPONSE_CLIP_RATIO,
    RESPONSE_LENGTH_PREFIX,
    REWARD_ERROR_RATE,
    REWARD_PREFIX,
    REWARD_TIMEOUT_RATE,
    TIMEOUT_RATE,
    spread,
)
from rljob_trainer.observability.samples import Sample, SampleKind
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.rewards.base import RewardStatus, excerpt
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
    SAMPLE_SEEDS,
    SCORES,
    TURN_BEGINNINGS,
    score_column,
    status_column,
)
from rljob_trainer.workers.protocols import HybridGroup, PendingResult, RewardGroup, RewardModelGroup
from rljob_trainer.workers.reward import STATUSES

MAX_SEED = 2**31
MAX_PROMPT_CHARACTERS = 200
"""Of a prompt in a message."""
REWARD_COLUMNS = (PROMPT_TEXTS, TURN_BEGINNINGS, ANSWERS, DATASET_ROWS)
MODEL_COLUMNS = (PROMPT_TEXTS, PROMPT_MESSAGES, PLAIN_TURN_BEGINNINGS)
"""Of prompts, for rewards that are functions and for one that is a model."""


@dataclass(frozen=True)
class ModelReward:
    """The model among the rewards."""

    group: RewardModelGroup
    columns: Sequence[str]
    """What it reads of a response."""
    num_data_ranks: int
    """Parts that its batches are split into."""


@dataclass(frozen=True)
class Scoring:
    """Scores that are on their way."""

    by_rewards: PendingResult[DataProto]
    """By processes, and from lengths."""
    by_model: PendingResult[DataProto] | None = None
    """By the model among the rewards, where there is one."""
    order_B: torch.Tensor | None = None
    """int64: that of the rows in the model's call; None where it has them as they are."""


@dataclass(frozen=True)
class Rollout:
    """Responses, and what they are worth once that is known; row i of every part belongs together."""

    prompts: tuple[PromptRow, ...]
    batch: DataProto
    """Columns of a rollout (see workers/columns), and those of scores; those with one number per response are here."""
    weights: Mapping[str, float]
    """Of the rewards, by name."""
    scoring: Scoring | None = None
    """Of all rows, and of a greedy response to each prompt where those were asked for. None once the scores are among
    the columns; what is computed from scores needs that."""
    greedy_rewards_B: torch.Tensor | None = None
    """float32: what the greedy response to the row's prompt is worth; None where there is none."""

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
        """[B] float32: the weighted sums of what the rewards gave."""
        return self.batch[SCORES].float()

    @property
    def named_rewards_B(self) -> dict[str, torch.Tensor]:
        """[B] float32 each: what the rewards gave, by name, before their weights."""
        return {name: self.batch[score_column(name)].float() for name in self.weights}

    def differs(self, groups_B: torch.Tensor, *, by_name: bool) -> torch.Tensor:
        """[B] bool: the responses of the row's group are not all worth the same; with `by_name`, by any reward that
        counts in the sum, for advantages that compare each for itself."""
        named = [each_B for name, each_B in self.named_rewards_B.items() if self.weights[name] != 0]
        is_equal_B = torch.ones(len(groups_B), dtype=torch.bool)
        for each_B in named if by_name else [self.rewards_B]:
            is_equal_B = is_equal_B & zero_variance_mask(each_B, groups_B)
        return ~is_equal_B

    def metrics(self) -> dict[str, float]:
        """Rewards, together and each by its name, lengths, and failures of the rewards."""
        num_rows = len(self.prompts)
        found: dict[str, float] = {}
        has_failed = dict.fromkeys((RewardStatus.ERROR, RewardStatus.TIMEOUT), torch.zeros(num_rows, dtype=torch.bool))
        for name in self.weights:
            prefix = f"{NAMED_REWARD_PREFIX}/{name}"
            found |= spread(prefix, self.batch[score_column(name)].tolist())
            if status_column(name) not in self.batch:
                continue
            for status, metric in ((RewardStatus.ERROR, ERROR_RATE), (RewardStatus.TIMEOUT, TIMEOUT_RATE)):
                has_failed_B = self.batch[status_column(name)] == STATUSES.index(status)
                has_failed[status] = has_failed[status] | has_failed_B
                found[f"{prefix}/{metric}"] = float(has_failed_B.sum()) / num_rows
        return {
            **spread(REWARD_PREFIX, self.rewards_B.tolist()),
            **spread(RESPONSE_LENGTH_PREFIX, self.batch[RESPONSE_LENGTHS].double().tolist()),
            RESPONSE_CLIP_RATIO: float(self.batch[IS_TRUNCATED].float().mean()),
            PROMPT_LENGTH_MEAN: sum(len(prompt.token_ids) for prompt in self.prompts) / num_rows,
            PROMPT_LENGTH_MAX: float(max(len(prompt.token_ids) for prompt in self.prompts)),
            REWARD_ERROR_RATE: float(has_failed[RewardStatus.ERROR].sum()) / num_rows,
            REWARD_TIMEOUT_RATE: float(has_failed[RewardStatus.TIMEOUT].sum()) / num_rows,
            **found,
        }


class RolloutPhase:
    """Generates and scores. `weights` are those of the rewards, by name."""

    def __init__(
        self,
        hybrid: HybridGroup,
        reward: RewardGroup,
        weights: Mapping[str, float],
        timer: PhaseTimer,
        stop: StopRequest,
        model_reward: ModelReward | None = None,
    ) -> None:
        self.hybrid = hybrid
        self.reward = reward
        self.model_reward = model_reward
        self.weights = weights
        self.timer = timer
        self.stop = stop

    def run(
        self, prompts: Sequence[PromptRow], num_responses: int, sampling: SamplingSettings, seeds: torch.Tensor
    ) -> Rollout:
        """`begin` and `scored`, for whoever has nothing else to do meanwhile."""
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
    ) -> Rollout:
        """So many responses to each prompt, those of one prompt side by side, by the present weights, or where it does
        not sync by those that the rollout engine has; with one more for each prompt that is greedy, of which the score
        alone is kept. `seeds` is [B] int64. Their scoring has begun; one rollout at a time can be scored."""
        once = stored(prompt_batch(prompts))
        asked = once.repeat(num_responses)
        columns = {SAMPLE_SEEDS: seeds}
        if with_greedy:
            asked = DataProto.concat([asked, once])
            is_greedy_B = torch.arange(len(asked)) >= len(seeds)
            columns = {SAMPLE_SEEDS: seeds.new_zeros(len(asked)), IS_GREEDY: is_greedy_B}
            columns[SAMPLE_SEEDS][: len(seeds)] = seeds
        request = asked.only([PROMPT_TOKEN_IDS]).with_columns(columns)
        with self.timer.phase("rollout"):
            batch = self.hybrid.generate_sequences(request, sampling, syncs)
        with self.timer.phase("reward"):
            responses = batch.only([RESPONSE_TEXTS, RESPONSE_LENGTHS]).union(asked.only(REWARD_COLUMNS))
            scoring = self._scoring(self.reward.start_scoring(responses), batch.union(asked.only(MODEL_COLUMNS)))
        repeated = tuple(prompt for prompt in prompts for _ in range(num_responses))
        kept = batch.slice(0, len(repeated)) if with_greedy else batch
        return Rollout(repeated, kept, self.weights, scoring)

    def _scoring(self, by_rewards: PendingResult[DataProto], batch: DataProto) -> Scoring:
        """With the reward model's call, where there is one: each of its workers has about as many tokens."""
        if self.model_reward is None:
            return Scoring(by_rewards)
        order_B = None
        num_ranks = self.model_reward.num_data_ranks
        if num_ranks > 1 and len(batch) % num_ranks == 0:
            order_B = balanced_order(batch[RESPONSE_LENGTHS], num_ranks, len(batch))
            batch = batch.reorder(order_B)
        by_model = self.model_reward.group.compute_scores(batch.only(self.model_reward.columns))
        return Scoring(by_rewards, by_model, order_B)

    def scored(self, rollout: Rollout) -> Rollout:
        """The rollout with its scores, once they are there; one that has them as it is.

        Raises RewardError when a reward fails and the job says so, and for a score that is no finite number,
        StepAbandonedError when a stop was asked for meanwhile."""
        if rollout.scoring is None:
            return rollout
        with self.timer.phase("reward"):
            scores = self._scores(rollout.scoring)
        totals_B = torch.zeros(len(scores), dtype=torch.float64)
        for name, weight in self.weights.items():
            totals_B += weight * scores[score_column(name)]
        _refuse_not_finite(rollout, scores, totals_B)
        num_rows, greedy_B = len(rollout.prompts), None
        if len(scores) > num_rows:
            num_prompts = len(scores) - num_rows
            greedy_B = totals_B[num_rows:].float().repeat_interleave(num_rows // num_prompts)
            scores, totals_B = scores.slice(0, num_rows), totals_B[:num_rows]
        batch = rollout.batch.union(scores).with_columns({SCORES: totals_B})
        return replace(rollout, batch=batch, scoring=None, greedy_rewards_B=greedy_B)

    def samples(self, rollout: Rollout, step: int, kind: SampleKind, max_samples: int | None = None) -> list[Sample]:
        """One sample per response, or of the first ones, with the texts that rewards were given. A worker picks the
        responses out; the others stay there."""
        prompts = rollout.prompts[:max_samples]
        picked = self.reward.response_texts(rollout.batch.slice(0, len(prompts)).only([RESPONSE_TEXTS, FOUND]))
        texts, found = picked.object_column(RESPONSE_TEXTS), picked.object_column(FOUND)
        scores = rollout.batch[SCORES].tolist()
        by_name = {name: rollout.batch[score_column(name)].tolist() for name in rollout.weights}
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
            )
            for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        ]

    def _scores(self, scoring: Scoring) -> DataProto:
        """Scores are not trusted once a stop was asked for: what a reward has started may have been signalled."""
        try:
            scores = self.reward.finish_scoring(scoring.by_rewards.result())
        except RewardError as error:
            if self.stop.is_requested:
                raise StepAbandonedError from error
            raise
        if self.stop.is_requested:
            raise StepAbandonedError
        if scoring.by_model is None:
            return scores
        by_model = scoring.by_model.result()
        return scores.union(by_model if scoring.order_B is None else by_model.reorder(scoring.order_B.argsort()))


def _by_reward(found: object) -> dict[str, str]:
    assert isinstance(found, Mapping), "a row of FOUND"
    return {str(name): str(text) for name, text in found.items()}


def _refuse_not_finite(rollout: Rollout, scores: DataProto, totals_B: torch.Tensor) -> None:
    """Raises RewardError for what is no finite number in 32 bits, in which it is learned from: a single one would make
    the advantages of its group, or of the batch, such. Rows beyond those of the rollout are greedy ones."""
    asked = [
        *(
            (f"spec.training.rewards[{index}] (reward {name})", scores[score_column(name)])
            for index, name in enumerate(rollout.weights)
        ),
        ("spec.training.rewards: the weighted sum of all rewards", totals_B),
    ]
    for where, values_B in asked:
        places = (~values_B.float().isfinite()).nonzero().flatten().tolist()
        if places:
            num_rows = len(rollout.prompts)
            num_responses = num_rows // (len(values_B) - num_rows) if len(values_B) > num_rows else 1
            first = places[0]
            prompt = rollout.prompts[first if first < num_rows else (first - num_rows) * num_responses].prompt
            raise RewardError(
                f"{where}: {float(values_B[first])} for a response to {excerpt(prompt, MAX_PROMPT_CHARACTERS)!r}, "
                f"which is no finite number of 32 bits ({len(places)} of {len(values_B)} responses); fix the reward, "
                "or lower its weight"
            )


def prompt_batch(prompts: Sequence[PromptRow]) -> DataProto:
    """What workers need of the prompts."""
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
    """[count] int64 seeds that depend on nothing but the arguments, so that a resumed run draws the same ones.

    `stream` keeps training and evaluation apart."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([job_seed, stream, step])))
    return torch.from_numpy(generator.integers(0, MAX_SEED, size=count, dtype=np.int64))
