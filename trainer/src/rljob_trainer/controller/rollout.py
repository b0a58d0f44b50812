"""The responses of a rollout with their scores, and what metrics say about them.

Legend: B responses (prompts x group size), S scored responses: B, then one greedy response per prompt if requested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rljob_trainer.algorithms.advantages import zero_variance_mask
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.datasets.prompts import PromptRow
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
from rljob_trainer.rewards.base import RewardStatus
from rljob_trainer.workers.columns import (
    IS_TRUNCATED,
    RESPONSE_LENGTHS,
    SCORES,
    score_column,
    status_column,
)
from rljob_trainer.workers.protocols import PendingResult
from rljob_trainer.workers.reward import STATUSES


@dataclass(frozen=True)
class Scoring:
    """Pending scores of a rollout."""

    ids_S: torch.Tensor
    """int64: SAMPLE_IDS of the responses."""
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
    greedy_rewards_B: torch.Tensor | None = None
    """float32: reward of the greedy response to the row's prompt; None if there are no greedy responses."""

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
        """[B] float32: the weighted sums of the rewards."""
        return self.batch[SCORES].float()

    @property
    def named_rewards_B(self) -> dict[str, torch.Tensor]:
        """[B] float32 each: the rewards by name, without their weights."""
        return {name: self.batch[score_column(name)].float() for name in self.weights}

    def has_reward_variance(self, *, by_name: bool) -> torch.Tensor:
        """Returns [B] bool: whether the rewards differ within the row's group. With `by_name` each reward is compared
        separately, except those with weight 0; then it is enough if one of them differs. Advantages that compare each
        reward separately need this."""
        named = [each_B for name, each_B in self.named_rewards_B.items() if self.weights[name] != 0]
        is_equal_B = torch.ones(len(self.groups_B), dtype=torch.bool)
        for each_B in named if by_name else [self.rewards_B]:
            is_equal_B = is_equal_B & zero_variance_mask(each_B, self.groups_B)
        return ~is_equal_B

    def metrics(self) -> dict[str, float]:
        """Returns metrics: rewards in total and by name, lengths, and error rates of the rewards."""
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
