"""The order of rows in which all workers have about the same number of tokens in every update."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_trainer.controller.balanced_order import balanced_order, imbalance
from rljob_trainer.errors import DataError


def test_long_and_short_rows_are_distributed_in_every_update() -> None:
    lengths = torch.tensor([900, 100, 800, 200, 10, 20, 30, 40])
    order = balanced_order(lengths, num_workers=2, rows_per_update=4)
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
    order = balanced_order(learned, num_workers=8, rows_per_update=256)
    assert imbalance(learned[order], 8) <= 1.02
    for update in range(2):
        of_update = order.view(8, 2, 32)[:, update].flatten()
        assert imbalance(learned[of_update], 8) <= 1.02
    # Balancing all rows would give workers very different numbers of trained rows.
    assert imbalance(learned[balanced_order(lengths, 8, 256)], 8) > 1.08


def test_one_worker_keeps_the_order() -> None:
    assert balanced_order(torch.tensor([5, 1, 9, 2]), 1, 2).tolist() == [0, 1, 2, 3]


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
    order = balanced_order(lengths, num_workers, rows_per_update)
    shares = order.view(num_workers, num_updates, rows_of_worker)
    for update in range(num_updates):
        start = update * rows_per_update
        rows = shares[:, update].flatten().tolist()
        assert sorted(rows) == list(range(start, start + rows_per_update))


def test_rows_that_do_not_divide_are_rejected() -> None:
    with pytest.raises(DataError, match=r"3 lengths .* 2 partitions"):
        balanced_order(torch.tensor([1, 2, 3]), 2, 3)
