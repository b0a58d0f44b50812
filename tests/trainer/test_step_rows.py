"""How a step's rows reach the workers of actor and critic: for any number of workers, each row is used once, in the
update that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.balanced_order import RowCosts
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.controller.step_plan import StepPlan
from rljob_trainer.controller.step_rows import StepRows
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.observability.metrics import ALONE_FRACTION, MICRO_BATCH_IMBALANCE, TOKEN_IMBALANCE
from rljob_trainer.rewards.base import RewardStatus
from rljob_trainer.workers.columns import (
    HAS_ENGINE_ERROR,
    NUM_TOKENS,
    PASS_MICRO_BATCHES,
    UPDATE_MICRO_BATCHES,
    score_column,
    status_column,
)
from rljob_trainer.workers.columns import NUM_ROWS as NUM_ROWS_COLUMN
from rljob_trainer.workers.reward import STATUSES

NUM_UPDATES, ROWS_PER_UPDATE = 3, 8
NUM_ROWS = NUM_UPDATES * ROWS_PER_UPDATE
ROWS = torch.arange(NUM_ROWS)
NAME = "number"
MAX_TOKENS = 60
SHARES = st.sampled_from([1, 2, 4, 8])


def plan_of(num_ranks: int, num_critic_ranks: int, critic_tokens: int) -> StepPlan:
    return StepPlan(
        algorithm=resolve_algorithm(Algorithm()),
        sampling=SamplingSettings(1.0, 1.0, 0, 8, ()),
        group_size=4,
        has_single_update=False,
        seed=0,
        num_data_ranks=num_ranks,
        num_critic_ranks=num_critic_ranks,
        row_costs=RowCosts(MAX_TOKENS, 0.0),
        critic_row_costs=RowCosts(critic_tokens, 0.0),
        reference_follows_actor=True,
        critic_warmup_steps=0,
        rows_per_update=ROWS_PER_UPDATE,
        has_dropout=False,
        sync_every_steps=1,
    )


def rollout_of(
    tokens_R: torch.Tensor,
    groups_B: torch.Tensor = ROWS,
    columns: Mapping[str, torch.Tensor] | None = None,
    num_rows_B: torch.Tensor | None = None,
) -> Rollout:
    """A rollout with the reward `a`, whose rows have these numbers of tokens."""
    counts_B = torch.ones_like(groups_B) if num_rows_B is None else num_rows_B
    batch = DataProto({NUM_ROWS_COLUMN: counts_B, **(columns or {})})
    return Rollout((), groups_B, batch, DataProto({NUM_TOKENS: tokens_R}), {"a": 1.0})


def updates_of(rows_B: torch.Tensor, num_ranks: int) -> list[list[int]]:
    """The row numbers that each update uses, whichever worker computes them."""
    by_rank = rows_B.view(num_ranks, NUM_UPDATES, -1)
    return [sorted(by_rank[:, update].flatten().tolist()) for update in range(NUM_UPDATES)]


def fullest_micro_batch(batch: DataProto, lengths_B: torch.Tensor, num_ranks: int) -> int:
    """The largest number of tokens in a planned micro-batch; 0 if none is planned. Each planned row has a number."""
    numbers = batch[UPDATE_MICRO_BATCHES].view(num_ranks, NUM_UPDATES, -1)
    if num_ranks == 1:
        return int((numbers >= 0).sum())
    lengths = lengths_B[batch[NAME]].view(numbers.shape)
    assert torch.equal(numbers >= 0, lengths > 0)
    return max(int(lengths.where(numbers == number, 0).sum(dim=2).max()) for number in range(int(numbers.max()) + 2))


@given(
    lengths=st.lists(st.integers(0, 50), min_size=NUM_ROWS, max_size=NUM_ROWS),
    drawn=st.none() | st.lists(st.integers(0, NUM_ROWS - 1), min_size=NUM_ROWS, max_size=NUM_ROWS),
    num_ranks=SHARES,
    num_critic_ranks=SHARES,
    critic_tokens=st.sampled_from([50, MAX_TOKENS, 2 * MAX_TOKENS]),
)
def test_actor_and_critic_use_the_same_rows_in_each_update(
    lengths: list[int], drawn: list[int] | None, num_ranks: int, num_critic_ranks: int, critic_tokens: int
) -> None:
    plan, lengths_B = plan_of(num_ranks, num_critic_ranks, critic_tokens), torch.tensor(lengths)
    everything_B = torch.ones(NUM_ROWS, dtype=torch.bool)
    rows = StepRows.of(plan, rollout_of(lengths_B), everything_B)
    batch = DataProto(
        {
            NAME: torch.arange(NUM_ROWS)[rows.order_P],
            UPDATE_MICRO_BATCHES: rows.row_plan.update_micro_batch_B,
            PASS_MICRO_BATCHES: rows.row_plan.pass_micro_batch_B,
        }
    )
    expected_B = torch.arange(NUM_ROWS)
    if drawn is not None:
        expected_B = torch.tensor(drawn)
        batch, rows = rows.with_responses_replaced(batch, expected_B)
        assert torch.equal(rows.lengths_P, lengths_B[expected_B])
        # Planned for the rows before.
        assert PASS_MICRO_BATCHES not in batch.column_names()
    expected = [sorted(each.tolist()) for each in expected_B.split(ROWS_PER_UPDATE)]
    critics = rows.for_critic(batch)
    for of_role, ranks, max_tokens in (
        (batch, num_ranks, MAX_TOKENS),
        (critics, num_critic_ranks, critic_tokens),
    ):
        assert updates_of(of_role[NAME], ranks) == expected
        fullest = fullest_micro_batch(of_role, lengths_B, ranks)
        assert fullest == 0 if ranks == 1 else fullest <= max_tokens


@pytest.mark.parametrize("has_flat_rows", [True, False])
def test_only_models_that_follow_the_plan_have_its_metric(has_flat_rows: bool) -> None:
    plan = replace(plan_of(2, 2, MAX_TOKENS), has_flat_rows=has_flat_rows)
    lengths_B = torch.arange(NUM_ROWS)
    rows = StepRows.of(plan, rollout_of(lengths_B), lengths_B >= 0)
    metrics = rows.metrics()
    assert (MICRO_BATCH_IMBALANCE in metrics) is has_flat_rows
    assert TOKEN_IMBALANCE in metrics


@given(excluded=st.sets(st.integers(0, NUM_ROWS - 1)), num_ranks=SHARES)
def test_excluded_rows_are_dropped_and_the_others_stay_in_their_update(excluded: set[int], num_ranks: int) -> None:
    """Each group has two rows. A row that is left alone is dropped, too."""
    plan, lengths_B, groups_B = plan_of(num_ranks, num_ranks, MAX_TOKENS), torch.arange(1, NUM_ROWS + 1), ROWS // 2
    statuses = [RewardStatus.DIED if row in excluded else RewardStatus.OK for row in range(NUM_ROWS)]
    columns = {
        score_column("a"): torch.tensor([math.nan if row in excluded else 1.0 for row in range(NUM_ROWS)]),
        status_column("a"): torch.tensor([STATUSES.index(status) for status in statuses]),
        HAS_ENGINE_ERROR: torch.zeros(NUM_ROWS, dtype=torch.bool),
    }
    everything_B = torch.ones(NUM_ROWS, dtype=torch.bool)
    rollout = rollout_of(lengths_B, groups_B, columns)
    rows = StepRows.of(plan, rollout, everything_B)
    before = DataProto(
        {NAME: ROWS[rows.order_P], **dict.fromkeys((UPDATE_MICRO_BATCHES, PASS_MICRO_BATCHES), ROWS[rows.order_P])}
    )
    batch, kept = rows.without_uncounted(before, 2)
    assert (batch is before) is not excluded
    used = [row for row in range(NUM_ROWS) if not {row, row ^ 1} & excluded]
    assert kept.is_trained_B.nonzero().flatten().tolist() == used
    assert kept.lengths_P.tolist() == [row + 1 if row in used else 0 for row in range(NUM_ROWS)]
    assert torch.equal(batch[NAME], kept.order_P)
    assert updates_of(batch[NAME], num_ranks) == [each.tolist() for each in ROWS.split(ROWS_PER_UPDATE)]
    num_alone = sum(row not in excluded and (row ^ 1) in excluded for row in range(NUM_ROWS))
    assert kept.metrics()[ALONE_FRACTION] == num_alone / NUM_ROWS
