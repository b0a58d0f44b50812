"""Group-relative advantages and whitening: values worked out by hand, properties, and slow loops in float64."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.v1alpha1.advantage import GroupRelative
from rljob_trainer.algorithms.advantages import group_relative_advantages, zero_variance_mask
from rljob_trainer.algorithms.interfaces import OneWorker, ResponseInputs
from rljob_trainer.algorithms.several_workers import on_workers
from rljob_trainer.algorithms.whitening import whitened

REWARD = st.floats(min_value=-5, max_value=5, allow_nan=False, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)
ROWS = st.lists(st.tuples(REWARD, st.integers(min_value=-2, max_value=3)), min_size=1, max_size=24)


def relative(rewards_B: torch.Tensor, groups_B: torch.Tensor, *, by_std: bool = True) -> torch.Tensor:
    inputs = ResponseInputs(rewards_B, groups_B, torch.ones_like(groups_B))
    return group_relative_advantages(inputs, GroupRelative(normalize_by_std=by_std))


def slow_advantages(rows: list[tuple[float, int]], normalize_by_std: bool) -> list[float]:
    result = []
    for reward, group in rows:
        peers = [other for other, other_group in rows if other_group == group]
        mean = statistics.fmean(peers) if len(peers) > 1 else 0.0
        std = statistics.stdev(peers) if len(peers) > 1 else 1.0
        result.append((reward - mean) / (std + 1e-6) if normalize_by_std else reward - mean)
    return result


def test_groups_match_values_by_hand() -> None:
    # Group 7 is (1, 0, 0, 0): mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4, std 1/2. Group 3 is all equal.
    rewards_B = torch.tensor([1.0, 0.3, 0.0, 0.0, 0.3, 0.0])
    groups_B = torch.tensor([7, 3, 7, 7, 3, 7])
    expected_B = torch.tensor([1.5, 0.0, -0.5, -0.5, 0.0, -0.5])
    torch.testing.assert_close(relative(rewards_B, groups_B), expected_B, atol=5e-6, rtol=0)
    without_std_B = relative(rewards_B, groups_B, by_std=False)
    torch.testing.assert_close(without_std_B, torch.tensor([0.75, 0.0, -0.25, -0.25, 0.0, -0.25]))
    assert zero_variance_mask(rewards_B, groups_B).tolist() == [False, True, False, False, True, False]


def test_a_group_of_one_keeps_its_reward_and_is_not_zero_variance() -> None:
    rewards_B, groups_B = torch.tensor([3.0], dtype=torch.float64), torch.tensor([0])
    assert relative(rewards_B, groups_B).item() == pytest.approx(3.0 / (1 + 1e-6), rel=1e-12)
    assert relative(rewards_B, groups_B, by_std=False).item() == 3.0
    assert not zero_variance_mask(rewards_B, groups_B).item()


def test_equal_rewards_that_are_not_binary_fractions_give_no_advantage() -> None:
    advantages_B = relative(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.long))
    assert advantages_B.abs().max() < 1e-9


@given(ROWS, st.booleans())
def test_advantages_equal_a_loop_over_groups(rows: list[tuple[float, int]], normalize_by_std: bool) -> None:
    rewards_B = torch.tensor([reward for reward, _ in rows], dtype=torch.float64)
    groups_B = torch.tensor([group for _, group in rows])
    actual_B = relative(rewards_B, groups_B, by_std=normalize_by_std)
    expected_B = torch.tensor(slow_advantages(rows, normalize_by_std), dtype=torch.float64)
    torch.testing.assert_close(actual_B, expected_B, atol=1e-8, rtol=1e-6)


@given(ROWS)
def test_zero_variance_mask_equals_a_loop(rows: list[tuple[float, int]]) -> None:
    rewards_B = torch.tensor([reward for reward, _ in rows])
    groups_B = torch.tensor([group for _, group in rows])
    expected = []
    for _, group in rows:
        peers = [reward for reward, other_group in rows if other_group == group]
        expected.append(len(peers) > 1 and len(set(peers)) == 1)
    assert zero_variance_mask(rewards_B, groups_B).tolist() == expected


@given(ROWS)
def test_the_order_of_responses_does_not_matter(rows: list[tuple[float, int]]) -> None:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(rows)))
    rewards_B = torch.tensor([reward for reward, _ in rows], dtype=torch.float64)
    groups_B = torch.tensor([group for _, group in rows])
    shuffled_B = relative(rewards_B[order], groups_B[order])
    torch.testing.assert_close(shuffled_B, relative(rewards_B, groups_B)[order], atol=1e-8, rtol=1e-6)


def test_incompatible_shapes_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"vectors of the same length \(got \[4, 1\] and \[4\]\)"):
        relative(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))


VALUES = st.lists(st.lists(REWARD, max_size=6), min_size=1, max_size=4).filter(lambda parts: sum(map(len, parts)) > 1)


@settings(max_examples=40)
@given(VALUES)
def test_whitening_covers_the_tokens_of_all_workers(parts: list[list[float]]) -> None:
    tensors = [torch.tensor(part, dtype=torch.float64) for part in parts]
    whole = [value for part in parts for value in part]
    mean, variance = statistics.fmean(whole), statistics.variance(whole)
    expected = [(value - mean) / (variance + 1e-8) ** 0.5 for value in whole]
    actual_N = torch.cat(on_workers(tensors, whitened))
    assert actual_N.tolist() == pytest.approx(expected, abs=1e-8, rel=1e-6)


def test_whitening_matches_a_case_by_hand_and_rejects_too_few_tokens() -> None:
    # Mean 2, unbiased variance (4 + 0 + 4) / 2 = 4.
    whitened_N = whitened(torch.tensor([0.0, 2.0, 4.0]), OneWorker())
    torch.testing.assert_close(whitened_N, torch.tensor([-1.0, 0.0, 1.0]))
    assert whitened_N.dtype == torch.float32
    assert whitened(torch.tensor([3.0]), OneWorker()).tolist() == [0.0]
    assert whitened(torch.zeros(0), OneWorker()).tolist() == []
    assert whitened(torch.full((3,), 0.1), OneWorker()).abs().max() < 1e-9
