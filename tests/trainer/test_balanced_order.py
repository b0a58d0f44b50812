"""Plans of rows: every worker has about the same work in every micro-batch of every update."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_trainer.batch.joint_packing import NONE
from rljob_trainer.controller.balanced_order import RowCosts, balanced_order, imbalance, planned_rows
from rljob_trainer.errors import DataError

TOKENS_ONLY = RowCosts(max_tokens=100_000, per_square=0.0)


def order_of(lengths_B: torch.Tensor, num_workers: int, rows_per_update: int) -> torch.Tensor:
    sizes = [rows_per_update] * -(-len(lengths_B) // rows_per_update)
    return planned_rows(lengths_B, num_workers, sizes, TOKENS_ONLY).order_B


def test_long_and_short_rows_are_distributed_in_every_update() -> None:
    lengths = torch.tensor([900, 100, 800, 200, 10, 20, 30, 40])
    order = order_of(lengths, num_workers=2, rows_per_update=4)
    first, second = order[:4].tolist(), order[4:].tolist()
    # Rows 0 to 3 are used in the first update, the others in the second, by both workers.
    assert {*first[:2], *second[:2]} == {0, 1, 2, 3}
    assert sorted(lengths[first[:2]].tolist()) == [100, 900]
    assert lengths[first[2:]].sum() == lengths[second[2:]].sum() == 50
    assert imbalance(lengths[order], 2) == 1.0
    assert imbalance(lengths, 2) == pytest.approx(2000 / 1050)


@pytest.mark.parametrize("seed", range(5))
def test_work_is_balanced_when_half_of_the_groups_are_not_trained_on(seed: int) -> None:
    """Eight workers, two updates of 32 prompts with 8 responses each, of a few hundred tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.empty(512).log_normal_(5.0, 0.7, generator=generator).clamp(20, 1024).long()
    is_trained = torch.arange(512) // 8 % 2 == 0
    learned = lengths.where(is_trained, 0)
    order = order_of(learned, num_workers=8, rows_per_update=256)
    assert imbalance(learned[order], 8) <= 1.02
    for update in range(2):
        of_update = order.view(8, 2, 32)[:, update].flatten()
        assert imbalance(learned[of_update], 8) <= 1.02
    # Balancing all rows would give workers very different numbers of trained rows.
    assert imbalance(learned[order_of(lengths, 8, 256)], 8) > 1.08


def test_rows_of_a_pass_without_a_plan_are_balanced() -> None:
    lengths = torch.tensor([900, 100, 800, 200])
    assert imbalance(lengths[balanced_order(lengths, 2)], 2) == 1.0


def test_one_worker_keeps_the_order() -> None:
    assert order_of(torch.tensor([5, 1, 9, 2]), 1, 2).tolist() == [0, 1, 2, 3]


@settings(deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda workers: st.tuples(
            st.just(workers), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False)
        )
    )
)
def test_updates_have_the_same_rows_for_any_number_of_workers(case: tuple[int, int, int, object]) -> None:
    num_workers, rows_of_worker, num_updates, random = case
    rows_per_update = num_workers * rows_of_worker
    num_rows = rows_per_update * num_updates
    lengths = torch.tensor([random.randint(0, 1000) for _ in range(num_rows)])  # type: ignore[attr-defined]
    order = order_of(lengths, num_workers, rows_per_update)
    shares = order.view(num_workers, num_updates, rows_of_worker)
    for update in range(num_updates):
        start = update * rows_per_update
        rows = shares[:, update].flatten().tolist()
        assert sorted(rows) == list(range(start, start + rows_per_update))


def test_rows_that_do_not_divide_are_rejected() -> None:
    with pytest.raises(DataError, match=r"3 rows .* 2 workers"):
        order_of(torch.tensor([1, 2, 3]), 2, 3)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=24, max_size=24),
    num_workers=st.sampled_from([2, 4]),
    max_tokens=st.integers(50, 120),
)
def test_micro_batches_of_updates_and_passes_fit(lengths: list[int], num_workers: int, max_tokens: int) -> None:
    """Two updates. A pass has each row once; a micro-batch of a pass has whole micro-batches of updates."""
    lengths_B = torch.tensor(lengths)
    plan = planned_rows(lengths_B, num_workers, [12] * (len(lengths_B) // 12), RowCosts(max_tokens, 1e-3))
    ordered_B = lengths_B[plan.order_B]
    assert torch.equal(plan.update_micro_batch_B == NONE, ordered_B == 0)
    assert torch.equal(plan.pass_micro_batch_B == NONE, ordered_B == 0)
    update_B = plan.order_B // 12
    worker_B = torch.arange(24) // (24 // num_workers)
    sums: dict[tuple[int, ...], int] = {}
    passes: dict[tuple[int, int], set[int]] = {}
    columns = (worker_B, update_B, plan.update_micro_batch_B, plan.pass_micro_batch_B, ordered_B)
    for worker, update, of_update, of_pass, length in zip(*(each.tolist() for each in columns), strict=True):
        for key in ((0, worker, update, of_update), (1, worker, of_pass)):
            sums[key] = sums.get(key, 0) + length
        passes.setdefault((update, of_update), set()).add(of_pass)
    assert max(sums.values()) <= max_tokens
    assert all(len(each) == 1 for each in passes.values())


def test_micro_batches_of_small_updates_are_one_of_a_pass() -> None:
    plan = planned_rows(torch.tensor([10, 10, 10, 10, 60, 60, 10, 10]), 2, [4, 4], RowCosts(95, 0.0))
    assert plan.update_micro_batch_B.tolist() == [0] * 8
    assert plan.pass_micro_batch_B.tolist() == [0] * 8
    plan = planned_rows(torch.tensor([10, 10, 10, 10, 60, 60, 10, 10]), 2, [4, 4], RowCosts(85, 0.0))
    assert plan.update_micro_batch_B.tolist() == [0] * 8
    assert plan.pass_micro_batch_B.tolist() == [0, 0, 1, 1] * 2


def test_a_single_worker_packs_its_rows_itself() -> None:
    plan = planned_rows(torch.tensor([5, 1, 9, 2]), 1, [2, 2], TOKENS_ONLY)
    assert plan.update_micro_batch_B.tolist() == plan.pass_micro_batch_B.tolist() == [NONE] * 4
    assert plan.imbalance == 1.0


def test_imbalance_is_that_of_the_most_expensive_micro_batches() -> None:
    """Two workers, two micro-batches each: of 8 and 6, and of 5 and 5 tokens."""
    plan = planned_rows(torch.tensor([8, 6, 5, 5]), 2, [4], RowCosts(10, 0.0))
    assert plan.imbalance == pytest.approx(13 / 12)
