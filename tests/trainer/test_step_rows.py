"""How a step's rows reach the workers of actor and critic: for any number of workers, each row is used once, in the
update that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.observability.metrics import ALONE_FRACTION, MICRO_BATCH_IMBALANCE, TOKEN_IMBALANCE
from rljob_trainer.rewards.base import RewardStatus
from rljob_trainer.workers.columns import (
    IS_LOST,
    IS_TRAINED,
    NUM_TOKENS,
    PASS_MICRO_BATCHES,
    RESPONSE_NUMBERS,
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
PROMPTS = tuple(PromptRow(index, "", "", (1,), None, {}) for index in range(3))
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
        IS_LOST: torch.zeros(NUM_ROWS, dtype=torch.bool),
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


COUNTS = st.lists(st.integers(1, 3), min_size=NUM_ROWS - 1, max_size=NUM_ROWS - 1).map(lambda others: [2, *others])


def cut(counts: list[int], tokens_of: Callable[[int], int] = lambda row: row % 7 + 1) -> tuple[Rollout, torch.Tensor]:
    """A rollout whose responses have these numbers of rows, in groups of two, and the response of each row."""
    num_rows_B = torch.tensor(counts)
    tokens_R = torch.tensor([tokens_of(row) for row in range(int(num_rows_B.sum()))])
    scores = {score_column("a"): torch.ones(NUM_ROWS), IS_LOST: torch.zeros(NUM_ROWS, dtype=torch.bool)}
    return rollout_of(tokens_R, ROWS // 2, scores, num_rows_B), ROWS.repeat_interleave(num_rows_B)


def check_updates(rows: StepRows, batch: DataProto, responses_R: torch.Tensor, expected_B: torch.Tensor) -> None:
    """Checks that each worker has the same number of rows of each update, and each update all rows of its responses
    `expected_B` once, and at most one padding row for each further worker."""
    num_ranks = rows.plan.num_data_ranks
    assert torch.equal(batch[RESPONSE_NUMBERS], rows.layout.response_P[rows.order_P])
    for part in batch.chunk(num_ranks):
        updates = part[RESPONSE_NUMBERS] // ROWS_PER_UPDATE
        assert updates.tolist() == sorted(updates.tolist())
        assert [int((updates == each).sum()) * num_ranks for each in range(NUM_UPDATES)] == [*rows.layout.update_sizes]
    of_batch = batch[RESPONSE_NUMBERS] // ROWS_PER_UPDATE
    for update, responses in enumerate(expected_B.split(ROWS_PER_UPDATE)):
        wanted = [row for response in responses.tolist() for row in (responses_R == response).nonzero()[:, 0].tolist()]
        found = batch.rows(of_batch == update)
        assert sorted(found[NAME][found[IS_TRAINED]].tolist()) == sorted(wanted)
        assert 0 <= len(found) - len(wanted) < num_ranks
        assert set(found[NAME].tolist()) == set(wanted)


@given(
    counts=COUNTS,
    drawn=st.lists(st.integers(0, NUM_ROWS - 1), min_size=NUM_ROWS - 1, max_size=NUM_ROWS - 1),
    ranks=SHARES,
)
def test_all_rows_of_a_response_are_in_its_update(counts: list[int], drawn: list[int], ranks: int) -> None:
    rollout, responses_R = cut(counts)
    rows = StepRows.of(plan_of(ranks, ranks, MAX_TOKENS), rollout, ROWS >= 0)
    batch = DataProto(
        {
            NAME: torch.arange(len(responses_R))[rows.layout.source_P][rows.order_P],
            IS_TRAINED: rows.spread(rows.is_trained_B),
            RESPONSE_NUMBERS: rows.layout.response_P[rows.order_P],
            **dict.fromkeys((UPDATE_MICRO_BATCHES, PASS_MICRO_BATCHES), rows.order_P),
        }
    )
    check_updates(rows, batch, responses_R, ROWS)
    # A number for each row is summed over the rows of its response, whatever padding rows have.
    assert torch.equal(rows.sums(torch.where(batch[IS_TRAINED], batch[NAME], 99)), sums_of(responses_R))
    parts = rows.by_response(batch)
    assert torch.equal(torch.cat([part[NAME] for part in parts]), torch.arange(len(responses_R)))
    owners = [set(responses_R[part[NAME]].tolist()) for part in parts]
    assert len(owners) == ranks
    assert sum(map(len, owners)) == NUM_ROWS
    assert torch.equal(rows.for_workers(DataProto.concat(parts))[NAME], batch[NAME])
    replaced, drawn_rows = rows.with_responses_replaced(batch, torch.tensor([0, *drawn]))
    check_updates(drawn_rows, replaced, responses_R, torch.tensor([0, *drawn]))
    again, whole_rows = drawn_rows.with_responses_replaced(replaced, torch.ones(NUM_ROWS, dtype=torch.int64))
    # All drawn responses have one row each if the second drawn response has.
    assert (RESPONSE_NUMBERS in again) is whole_rows.has_several_rows is (counts[drawn[0]] > 1)


def sums_of(responses_R: torch.Tensor) -> torch.Tensor:
    return torch.zeros(NUM_ROWS, dtype=torch.int64).index_add_(0, responses_R, torch.arange(len(responses_R)))


@given(counts=COUNTS, excluded=st.sets(st.integers(0, NUM_ROWS - 1), min_size=1), ranks=SHARES)
def test_no_row_of_an_excluded_response_is_counted(counts: list[int], excluded: set[int], ranks: int) -> None:
    rollout, responses_R = cut(counts)
    is_excluded_B = torch.tensor([row in excluded for row in range(NUM_ROWS)])
    rollout = replace(rollout, batch=rollout.batch.with_columns({IS_LOST: is_excluded_B}))
    rows = StepRows.of(plan_of(ranks, ranks, MAX_TOKENS), rollout, ROWS >= 0)
    batch = DataProto(
        {
            NAME: torch.arange(len(responses_R))[rows.layout.source_P][rows.order_P],
            IS_TRAINED: rows.spread(rows.is_trained_B),
            **dict.fromkeys((UPDATE_MICRO_BATCHES, PASS_MICRO_BATCHES), rows.order_P),
        }
    )
    found, kept = rows.without_uncounted(batch, 1)
    used = [row for row, response in enumerate(responses_R.tolist()) if response not in excluded]
    is_used_P = kept.lengths_P[kept.order_P] > 0
    assert sorted(found[NAME][is_used_P].tolist()) == used
    assert kept.lengths_P.sum() == rollout.rows[NUM_TOKENS][used].sum()
    # Policy filtration may draw after responses were excluded.
    again, drawn = kept.with_responses_replaced(found, ROWS)
    assert torch.equal(again[NAME], found[NAME])
    assert torch.equal(drawn.lengths_P, kept.lengths_P)


def test_padding_rows_repeat_the_shortest_row_and_have_no_tokens() -> None:
    """24 responses in three updates, the first response has two rows: four workers need three more in its update."""
    rollout, _ = cut([2] + [1] * (NUM_ROWS - 1), lambda row: 9 - row % 9)
    rows = StepRows.of(plan_of(4, 4, MAX_TOKENS), rollout, ROWS >= 0)
    assert rows.layout.update_sizes == (12, 8, 8)
    assert rows.layout.source_P[rows.layout.is_padding_P].tolist() == [8] * 3
    assert rows.lengths_P.sum() == rollout.rows[NUM_TOKENS].sum()
    assert rollout.num_tokens() == int(rollout.rows[NUM_TOKENS].sum())


def test_replaced_and_selected_responses_have_their_rows() -> None:
    counts = torch.tensor([2, 1, 3])
    columns = {NAME: torch.arange(3), IS_LOST: torch.tensor([False, True, False])}
    rollout = rollout_of(torch.tensor([1, 2, 3, 4, 5, 6]), torch.arange(3), columns, counts)
    rollout = replace(rollout, prompts=PROMPTS, weights={})
    others = rollout_of(
        torch.tensor([7, 8]),
        torch.tensor([0]),
        {NAME: torch.tensor([9]), IS_LOST: torch.tensor([False])},
        torch.tensor([2]),
    )
    found = rollout.with_replaced(torch.tensor([1]), replace(others, prompts=PROMPTS[:1], weights={}))
    assert found.batch[NAME].tolist() == [0, 9, 2]
    assert found.rows[NUM_TOKENS].tolist() == [1, 2, 7, 8, 4, 5, 6]
    assert found.num_lost == 1
    both = Rollout.concat([rollout, found])
    assert both.rows[NUM_TOKENS].tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 7, 8, 4, 5, 6]
    assert both.selected(torch.tensor([4, 0])).rows[NUM_TOKENS].tolist() == [7, 8, 1, 2]
