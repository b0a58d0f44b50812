"""The responses of a rollout with their scores, and what metrics say about them.

A response has one row of tokens, or several that are trained on together: they share its group, score and advantage.

Legend: B responses (prompts x group size), R rows of these responses, S scored responses: B, then one greedy response
per prompt if requested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from rljob_trainer.algorithms.advantages import zero_variance_mask
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.outcomes import (
    ROLLOUT,
    Reasons,
    conversation_metrics,
    is_without_score,
    outcome_metrics,
    reasons_of,
    reward_metrics,
)
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import Outcome
from rljob_trainer.observability.metrics import (
    EQUAL_SCORES_FRACTION,
    PROMPT_LENGTH_MAX,
    PROMPT_LENGTH_MEAN,
    REPLACED_FRACTION,
    RESPONSE_CLIP_RATIO,
    RESPONSE_LENGTH_PREFIX,
    REWARD_FAILED_FRACTION,
    REWARD_PREFIX,
    ROLLOUT_FAILED_FRACTION,
    ROWS_PER_RESPONSE_MAX,
    ROWS_PER_RESPONSE_MEAN,
    SOURCE_PREFIX,
    SOURCE_PROMPTS,
    spread,
)
from rljob_trainer.workers.columns import (
    IS_LOST,
    IS_TRUNCATED,
    NUM_ROWS,
    NUM_TOKENS,
    POLICY_VERSIONS,
    PROMPT_LENGTHS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    SAMPLE_IDS,
    SCORES,
    TOKENS,
    score_column,
)
from rljob_trainer.workers.protocols import PendingResult

TOKEN_COLUMNS = (TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS, POLICY_VERSIONS)
"""Columns of a rollout that an update needs."""
ROW_COLUMNS = (*TOKEN_COLUMNS, NUM_TOKENS)
"""Columns of `Rollout.rows`."""


@dataclass(frozen=True)
class Scoring:
    """Pending scores of a rollout."""

    ids_S: torch.Tensor
    """int64: SAMPLE_IDS of the responses."""
    is_lost_S: torch.Tensor
    """bool: IS_LOST."""
    by_model: PendingResult[DataProto] | None = None
    """Scores of the reward model, if there is one."""
    order_S: torch.Tensor | None = None
    """int64: order of the rows in the reward model's call; None: not reordered."""


@dataclass(frozen=True)
class Rollout:
    """The responses of a rollout, and their scores once they are computed. Row i of all parts except `rows` is the same
    response."""

    prompts: tuple[PromptRow, ...]
    """The prompt of each response."""
    groups_B: torch.Tensor
    """int64: the number of each response's group in its step. The responses to one prompt are a group."""
    batch: DataProto
    """Columns of a rollout (see workers/columns) and scores. Only columns with one number per response are local."""
    rows: DataProto
    """[R]: ROW_COLUMNS of the rows of all responses, response after response (see NUM_ROWS)."""
    weights: Mapping[str, float]
    """Weights of the rewards, by name."""
    scoring: Scoring | None = None
    """The pending scores: one per row, then one per greedy response if greedy responses were requested. None once the
    scores are in `batch`. The properties and methods below that read scores need them in `batch`."""
    greedy: DataProto | None = None
    """SCORES, IS_LOST and what the rewards returned, for the greedy response to each row's prompt; None if
    there are no greedy responses."""

    lost: Reasons = field(default_factory=Reasons)
    """Why responses were excluded that others have replaced (`with_replaced`)."""
    num_lost: int = 0
    """The number of these responses."""

    def num_tokens(self) -> int:
        """All tokens of all rows."""
        return int(self.rows[NUM_TOKENS].sum())

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
        """[B] bool: whether the engine did not complete the response, or a reward with a weight other than 0 gave no
        score, to the response or to the greedy response that it is compared with."""
        parts = [self.batch] if self.greedy is None else [self.batch, self.greedy]
        return torch.stack([part[IS_LOST] | is_without_score(part, self.weights) for part in parts]).any(dim=0)

    def reasons(self) -> Reasons:
        """Returns why responses are excluded, or were excluded before other responses replaced them."""
        of_greedy = Reasons() if self.greedy is None else reasons_of(self.greedy, self.weights)
        return reasons_of(self.batch, self.weights) + of_greedy + self.lost

    def with_replaced(self, rows: torch.Tensor, others: Rollout) -> Rollout:
        """Replaces the excluded rows `rows`, int64, by those of another scored rollout to the same prompts."""
        index_B = torch.arange(len(self.prompts))
        index_B[rows] = len(index_B) + torch.arange(len(rows))
        greedy = self.greedy
        if greedy is not None and others.greedy is not None:
            greedy = DataProto.concat([greedy, others.greedy]).rows(index_B)
        batch = DataProto.concat([self.batch, others.batch])
        of_responses = DataProto.concat([self.rows, others.rows]).rows(row_numbers(batch[NUM_ROWS], index_B))
        return replace(
            self,
            batch=batch.rows(index_B),
            rows=of_responses,
            greedy=greedy,
            lost=self.reasons(),
            num_lost=self.num_lost + len(rows),
        )

    def selected(self, responses: torch.Tensor) -> Rollout:
        """Returns the responses with these numbers, int64, without greedy responses and without what was lost."""
        return Rollout(
            tuple(self.prompts[number] for number in responses.tolist()),
            self.groups_B[responses],
            self.batch.rows(responses),
            self.rows.rows(row_numbers(self.batch[NUM_ROWS], responses)),
            self.weights,
        )

    def first_groups(self, min_responses: int, max_responses: int) -> torch.Tensor:
        """Returns int64: the responses of the first groups that together have at least `min_responses` responses,
        group after group, and at most `max_responses` of them.

        Example: of groups of 3 responses, `first_groups(4, 5)` are the first group and two responses of the second."""
        found = list[int]()
        groups = self.groups_B.tolist()
        for group in dict.fromkeys(groups):
            if len(found) >= min_responses:
                break
            found += [number for number, each in enumerate(groups) if each == group]
        return torch.tensor(found[:max_responses], dtype=torch.int64)

    @staticmethod
    def concat(rollouts: Sequence[Rollout]) -> Rollout:
        """Returns the responses of several rollouts that have their scores and no greedy responses."""
        return Rollout(
            tuple(chain.from_iterable(each.prompts for each in rollouts)),
            torch.cat([each.groups_B for each in rollouts]),
            DataProto.concat([each.batch for each in rollouts]),
            DataProto.concat([each.rows for each in rollouts]),
            rollouts[0].weights,
            lost=sum((each.lost for each in rollouts), Reasons()),
            num_lost=sum(each.num_lost for each in rollouts),
        )

    def is_counted(self, min_members: int) -> torch.Tensor:
        """Returns [B] bool: whether the response counts for the advantages of its group: it is not excluded, and its
        group has at least `min_members` (1 or more) responses that are not excluded.

        Example: if 2 of 8 responses are excluded, the other 6 count; if 7 are excluded and `min_members` is 2, none
        counts."""
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

    def _scored_B(self) -> torch.Tensor:
        """Returns the rewards of the responses that have a score."""
        return self.rewards_B[~is_without_score(self.batch, self.weights)]

    def equal_scores_metrics(self, *, by_name: bool) -> dict[str, float]:
        """Returns the fraction of groups without a difference between their rewards (`has_reward_variance`), of the
        groups with at least two counted responses; nothing if there is no such group."""
        groups = set(self.groups_B[self.is_counted(2)].tolist())
        different = set(self.groups_B[self.has_reward_variance(by_name=by_name)].tolist())
        return {EQUAL_SCORES_FRACTION: 1 - len(different) / len(groups)} if groups else {}

    def differs(self, values_B: torch.Tensor) -> torch.Tensor:
        """Returns [B] bool: whether the response is compared, which means that it has a value and counts in its group,
        and the values of the compared responses of its group differ. Legend: C compared responses."""
        is_compared_B = self.is_counted(2) & ~values_B.isnan()
        differs_B = torch.zeros_like(is_compared_B)
        values_C, groups_C = values_B[is_compared_B], self.groups_B[is_compared_B]
        _, index_C, sizes_G = torch.unique(groups_C, return_inverse=True, return_counts=True)
        differs_B[is_compared_B] = ~zero_variance_mask(values_C, groups_C) & (sizes_G > 1)[index_C]
        return differs_B

    def metrics(self) -> dict[str, float]:
        """Returns metrics: rewards in total and by name, lengths, outcomes, and error rates of the rewards."""
        num_responses, is_excluded_B = len(self.prompts), self.is_excluded_B
        num_rows_B, prompts_B = self.batch[NUM_ROWS], self.batch[PROMPT_LENGTHS]
        num_generated, num_excluded = num_responses + self.num_lost, int(is_excluded_B.sum()) + self.num_lost
        # Reasons may count a response several times, for several rewards.
        num_of_rollout = min(num_excluded, self.reasons()[ROLLOUT, Outcome.INFRASTRUCTURE])
        of_rows = {
            ROWS_PER_RESPONSE_MEAN: float(num_rows_B.double().mean()),
            ROWS_PER_RESPONSE_MAX: float(num_rows_B.max()),
        }
        return {
            **(spread(REWARD_PREFIX, self._scored_B().tolist()) if self.weights else {}),
            **spread(RESPONSE_LENGTH_PREFIX, self.batch[RESPONSE_LENGTHS].double().tolist()),
            RESPONSE_CLIP_RATIO: float(self.batch[IS_TRUNCATED].float().mean()),
            PROMPT_LENGTH_MEAN: int(prompts_B.sum()) / num_responses,
            PROMPT_LENGTH_MAX: float(prompts_B.max()),
            **(of_rows if len(self.rows) > num_responses else {}),
            **reward_metrics(self.batch, self.weights),
            **outcome_metrics(self.batch, is_excluded_B),
            **self._source_metrics(),
            **conversation_metrics(self.batch),
            REPLACED_FRACTION: self.num_lost / num_responses,
            REWARD_FAILED_FRACTION: (num_excluded - num_of_rollout) / num_generated,
            ROLLOUT_FAILED_FRACTION: num_of_rollout / num_generated,
        }

    def _source_metrics(self) -> dict[str, float]:
        """Returns the metrics of each of `training.datasets`, and of each source."""
        found, has_score_B = dict[str, float](), ~is_without_score(self.batch, self.weights)
        for name in dict.fromkeys(name for prompt in self.prompts for name in prompt.metric_names):
            is_from_B = torch.tensor([name in prompt.metric_names for prompt in self.prompts])
            found[f"{SOURCE_PREFIX}/{name}/{SOURCE_PROMPTS}"] = float(len(set(self.groups_B[is_from_B].tolist())))
            found |= spread(f"{SOURCE_PREFIX}/{name}/score", self.rewards_B[is_from_B & has_score_B].tolist())
        return found


def one_row_per_response(rows: DataProto) -> DataProto:
    """Returns the last row of each response, and NUM_ROWS. The rows of a response follow each other and have the same
    SAMPLE_IDS."""
    _, num_rows_B = torch.unique_consecutive(rows[SAMPLE_IDS], return_counts=True)
    last = rows if len(num_rows_B) == len(rows) else rows.rows(num_rows_B.cumsum(0) - 1)
    return last.with_columns({NUM_ROWS: num_rows_B})


def row_numbers(num_rows_B: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Returns int64: the numbers of the rows of these responses, response after response. `num_rows_B`: the number of
    rows of each response; all rows are numbered in the order of the responses.

    Example: if the first of two responses has two rows, the rows of the responses (1, 0) are (2, 0, 1)."""
    firsts, counts = (num_rows_B.cumsum(0) - num_rows_B)[responses], num_rows_B[responses]
    shifts = firsts - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + shifts.repeat_interleave(counts)
