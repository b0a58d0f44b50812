"""Steps of dynamic sampling on a dataset whose groups have known scores. The tokens of responses are references to
workers that do not exist, so a test fails if it fetches them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_api.v1alpha1.response_selection import DynamicSampling as DynamicSamplingSpec
from rljob_api.v1alpha1.response_selection import MaxRoundsPolicy
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.remote import RemoteBlock, ShardReference
from rljob_trainer.controller.balanced_order import RowCosts
from rljob_trainer.controller.dynamic_sampling import (
    DynamicSampling,
)
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.controller.step_plan import StepPlan
from rljob_trainer.controller.step_rows import StepRows
from rljob_trainer.datasets.cursor import DrawnRow, PromptCursor
from rljob_trainer.datasets.pass_rates import PassRates
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.rewards.base import RewardStatus
from rljob_trainer.workers.columns import IS_LOST, NUM_ROWS, NUM_TOKENS, SCORES, score_column, status_column
from rljob_trainer.workers.reward import STATUSES

GROUP_SIZE = 2
NUMBERS = "number_in_step"


@dataclass(frozen=True)
class Nowhere(ShardReference):
    """A reference to the tokens of a round, on a worker that does not exist."""

    number: int

    @classmethod
    def fetch_all(cls, references: Sequence[Self]) -> list[DataProto]:
        """Always fails the test."""
        raise AssertionError(f"fetched {references}")


@dataclass
class World:
    """A dataset in which some prompts have groups with different scores, its stream, and a generator of responses."""

    num_prompts: int
    differs: Callable[[int], bool]
    """For a prompt's row: whether the scores of its group differ. In the reward `right`, rows that are multiples of 3
    always have equal scores."""
    shuffle: bool = False
    status_of: Callable[[int, int], RewardStatus] = lambda _row, _number: RewardStatus.OK
    """For a prompt's row and the number of the response in its group: how the scoring ended."""
    rounds: list[list[int]] = field(default_factory=list)
    """The requested prompts of each round, by row."""
    by_pass_rate: bool = False

    def __post_init__(self) -> None:
        rows = [PromptRow(index, f"p{index}", "", (1,), None, {}) for index in range(self.num_prompts)]
        pass_rates = PassRates(range(self.num_prompts), 3) if self.by_pass_rate else None
        self.cursor = PromptCursor(rows, seed=3, shuffle=self.shuffle, digest="any", pass_rates=pass_rates)

    def generate(self, drawn: Sequence[DrawnRow[PromptRow]], num_drawn: int) -> Rollout:
        """Returns groups with the scores 0 and 1 if their scores differ, and otherwise with 0. Their tokens cannot be
        fetched."""
        prompts = [each.row for each in drawn]
        self.rounds.append([prompt.index for prompt in prompts])
        rows = [prompt.index for prompt in prompts for _ in range(GROUP_SIZE)]
        scores_B = torch.tensor([float(self.differs(row) and i % GROUP_SIZE) for i, row in enumerate(rows)])
        right_B = torch.tensor([float(row % 3 > 0) for row in rows]) * scores_B
        numbers_B = torch.arange(num_drawn, num_drawn + len(prompts)).repeat_interleave(GROUP_SIZE)
        ones_B = torch.ones(len(rows), dtype=torch.int64)
        columns = {NUM_ROWS: ones_B, SCORES: scores_B.double(), IS_LOST: ones_B < 1}
        columns |= {score_column("right"): right_B.double(), NUMBERS: numbers_B}
        statuses = [self.status_of(row, i % GROUP_SIZE) for i, row in enumerate(rows)]
        columns[status_column("right")] = torch.tensor([STATUSES.index(status) for status in statuses])
        is_missing_B = torch.tensor([status is not RewardStatus.OK for status in statuses])
        for name in (SCORES, score_column("right")):
            columns[name] = columns[name].masked_fill(is_missing_B, math.nan)
        block = RemoteBlock.of_shard(Nowhere(len(self.rounds)), ["tokens"], len(rows))
        repeated = tuple(prompt for prompt in prompts for _ in range(GROUP_SIZE))
        of_rows = DataProto({NUM_TOKENS: ones_B}, remote=(block,))
        return Rollout(repeated, numbers_B, DataProto(columns), of_rows, {"right": 1.0})

    def filled(
        self,
        num_wanted: int,
        max_rounds: int = 10,
        policy: MaxRoundsPolicy = MaxRoundsPolicy.FAIL,
        reward: str | None = None,
        num_updates: int = 1,
        num_workers: int = 1,
    ) -> StepRows:
        """The groups of the next step."""
        settings = DynamicSamplingSpec(max_rounds=max_rounds, on_max_rounds=policy, reward=reward)
        sampling = DynamicSampling(plan_of(settings, num_wanted // num_updates, num_workers), self.cursor)
        return sampling.filled(self.cursor.next_batch(num_wanted), 4, self.generate)


def plan_of(settings: DynamicSamplingSpec, groups_per_update: int, num_workers: int) -> StepPlan:
    return StepPlan(
        algorithm=resolve_algorithm(Algorithm(dynamic_sampling=settings)),
        sampling=SamplingSettings(1.0, 1.0, 0, 8, ()),
        group_size=GROUP_SIZE,
        has_single_update=False,
        seed=0,
        num_data_ranks=num_workers,
        num_critic_ranks=num_workers,
        row_costs=RowCosts(100, 0.0),
        critic_row_costs=RowCosts(100, 0.0),
        reference_follows_actor=True,
        critic_warmup_steps=0,
        rows_per_update=groups_per_update * GROUP_SIZE,
        has_dropout=False,
        sync_every_steps=1,
        max_failure_rate=0.5,
    )


def rows_of(rollout: Rollout) -> list[int]:
    """The rows of the prompts, one for each group."""
    found = [prompt.index for prompt in rollout.prompts]
    assert found[::GROUP_SIZE] == found[1::GROUP_SIZE]
    return found[::GROUP_SIZE]
