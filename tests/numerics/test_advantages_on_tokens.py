"""Advantages on tokens against slow loops over the rows of all workers, however the rows are distributed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.training import token_rows
from rljob_trainer.algorithms.advantage_registry import advantage_estimator
from rljob_trainer.algorithms.interfaces import (
    KL_PENALTIES,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    SQUARES,
    VALUES,
    AdvantageEstimator,
    OneWorker,
    Reduce,
    TokenAdvantages,
    TokenInputs,
)
from rljob_trainer.algorithms.several_workers import on_workers

NUMBER = st.integers(min_value=-16, max_value=16).map(lambda eighths: eighths / 8)
PROBABILITY = st.sampled_from([0.001, 0.1, 0.4, 0.9, 1.0])


@dataclass(frozen=True)
class Token:
    value: float = 0.0
    penalty: float = 0.0
    probability: float = 0.5
    teacher: float = 0.5
    """The probability that the reference gives the token."""
    spread: float = 0.0
    """How unevenly the rest of the probability is distributed: 1 puts it all on one token."""

    @property
    def squares(self) -> float:
        return self.probability**2 + (0.1 + 0.9 * self.spread) * (1 - self.probability) ** 2


@dataclass(frozen=True)
class Row:
    reward: float
    group: int
    tokens: tuple[Token, ...]


TOKENS = st.lists(
    st.builds(
        Token, NUMBER, st.sampled_from([0.0, 0.0, 0.125, -0.25]), PROBABILITY, PROBABILITY, st.sampled_from([0.0, 1.0])
    ),
    max_size=6,
)
ROWS = st.lists(st.builds(Row, NUMBER, st.sampled_from([0, 1, 1, 4]), TOKENS.map(tuple)), max_size=5)
WORKERS = st.lists(ROWS, min_size=1, max_size=4)
"""The rows of each worker."""


def estimator_of(**advantage: object) -> AdvantageEstimator:
    return advantage_estimator(resolve_algorithm(Algorithm.from_wire({"advantage": advantage})))


def inputs_of(rows: Sequence[Row], dtype: torch.dtype = torch.float64) -> TokenInputs:
    def column(read: Callable[[Token], float]) -> torch.Tensor:
        return torch.tensor([read(token) for row in rows for token in row.tokens], dtype=dtype)

    columns = {
        VALUES: column(lambda token: token.value),
        KL_PENALTIES: column(lambda token: token.penalty),
        OLD_LOGPROBS: column(lambda token: math.log(token.probability)),
        REF_LOGPROBS: column(lambda token: math.log(token.teacher)),
        SQUARES: column(lambda token: token.squares),
    }
    groups_B = torch.tensor([row.group for row in rows], dtype=torch.int64)
    rewards_B = torch.tensor([row.reward for row in rows], dtype=dtype)
    return TokenInputs(rewards_B, groups_B, token_rows.segments_of(*(len(row.tokens) for row in rows)), columns)


def found_by(
    workers: list[list[Row]], dtype: torch.dtype = torch.float64, **advantage: object
) -> tuple[list[float], list[float] | None]:
    """Advantages and returns of all rows, worker after worker."""
    for_tokens = estimator_of(**advantage).for_tokens
    assert for_tokens is not None

    def compute(rows: list[Row], reduce: Reduce) -> TokenAdvantages:
        return for_tokens(inputs_of(rows, dtype), reduce)

    parts = on_workers(workers, compute)
    assert {part.advantages_N.dtype for part in parts} == {dtype}
    returns = [part.returns_N for part in parts if part.returns_N is not None]
    return torch.cat([part.advantages_N for part in parts]).tolist(), torch.cat(returns).tolist() if returns else None


def slow_rewards(row: Row) -> list[float]:
    rewards = [-token.penalty for token in row.tokens]
    if rewards:
        rewards[-1] += row.reward
    return rewards


def slow_returns(row: Row, gamma: float) -> list[float]:
    found: list[float] = []
    for reward in reversed(slow_rewards(row)):
        found.insert(0, reward + gamma * (found[0] if found else 0.0))
    return found


def slow_gae(row: Row, gamma: float, lambda_: float) -> list[float]:
    values = [token.value for token in row.tokens] + [0.0]
    found: list[float] = []
    for position in reversed(range(len(row.tokens))):
        delta = slow_rewards(row)[position] + gamma * values[position + 1] - values[position]
        found.insert(0, delta + gamma * lambda_ * (found[0] if found else 0.0))
    return found


def slow_whitened(values: list[float]) -> list[float]:
    mean = statistics.fmean(values) if values else 0.0
    variance = statistics.variance(values) if len(values) > 1 else 0.0
    return [(value - mean) / (variance + 1e-8) ** 0.5 for value in values]


def slow_baseline(row: Row, position: int, rows: list[Row], zero_tail: bool) -> float:
    group = [each for each in rows if each.group == row.group and each.tokens]
    present = [each for each in group if len(each.tokens) > position]
    if len(group) == 1 or (zero_tail and len(present) == 1):
        return 0.0
    weights = [
        1e-8 + sum(1 - 2 * token.probability + token.squares for token in each.tokens[: position + 1])
        for each in present
    ]
    returns = [slow_returns(each, 1.0)[position] for each in present]
    return sum(g * w for g, w in zip(returns, weights, strict=True)) / sum(weights)


def slow_optimal(rows: list[Row], zero_tail: bool) -> list[float]:
    return [
        given - slow_baseline(row, position, rows, zero_tail)
        for row in rows
        for position, given in enumerate(slow_returns(row, 1.0))
    ]


@settings(max_examples=40)
@given(WORKERS, st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.5, 0.0]))
def test_gae_equals_a_loop(workers: list[list[Row]], gamma: float, lambda_: float) -> None:
    rows = [row for rows in workers for row in rows]
    plain = [advantage for row in rows for advantage in slow_gae(row, gamma, lambda_)]
    values = [token.value for row in rows for token in row.tokens]
    advantages, returns = found_by(workers, type="GAE", gae={"gamma": gamma, "lambda": lambda_})
    assert advantages == pytest.approx(slow_whitened(plain), rel=1e-6, abs=1e-6)
    # Before whitening: the critic's targets are in the units of the rewards.
    assert returns == pytest.approx([a + v for a, v in zip(plain, values, strict=True)], rel=1e-9, abs=1e-9)


@settings(max_examples=40)
@given(WORKERS, st.sampled_from([1.0, 0.9]))
def test_reinforce_plus_plus_equals_a_loop(workers: list[list[Row]], gamma: float) -> None:
    plain = [each for rows in workers for row in rows for each in slow_returns(row, gamma)]
    found = found_by(workers, type="ReinforcePlusPlus", reinforcePlusPlus={"gamma": gamma})
    assert found == (pytest.approx(slow_whitened(plain), rel=1e-6, abs=1e-6), None)


@settings(max_examples=60)
@given(WORKERS, st.booleans())
def test_the_optimal_token_baseline_equals_a_loop(workers: list[list[Row]], zero_tail: bool) -> None:
    rows = [row for rows in workers for row in rows]
    found = found_by(workers, type="OptimalTokenBaseline", optimalTokenBaseline={"zeroTail": zero_tail})
    assert found == (pytest.approx(slow_optimal(rows, zero_tail), rel=1e-6, abs=1e-6), None)


@settings(max_examples=40)
@given(WORKERS)
def test_distillation_equals_a_loop_without_rewards_groups_and_later_tokens(workers: list[list[Row]]) -> None:
    plain = [
        math.log(token.teacher / token.probability) - token.penalty
        for rows in workers
        for row in rows
        for token in row.tokens
    ]
    assert found_by(workers, type="Distillation") == (pytest.approx(plain, rel=1e-9, abs=1e-9), None)


def test_gae_matches_a_case_by_hand() -> None:
    # Row 1: delta = (0.5 - 0.25, 1 - 0.5) = (0.25, 0.5), A = (0.5, 0.5). Row 2: A = (-1).
    rows = [Row(1.0, 0, (Token(value=0.25), Token(value=0.5))), Row(0.0, 0, (Token(value=1.0),))]
    advantages, returns = found_by([rows], torch.float32, type="GAE", gae={"lambda": 0.5})
    assert returns == pytest.approx([0.75, 1.0, 0.0])
    # Mean 0, variance (1/4 + 1/4 + 1) / 2.
    assert advantages == pytest.approx([0.5 / 0.75**0.5, 0.5 / 0.75**0.5, -1 / 0.75**0.5])


def test_a_token_pays_for_its_own_kl() -> None:
    row = Row(1.0, 0, (Token(penalty=0.5), Token(penalty=0.25), Token()))
    found, _ = found_by([[row]], type="OptimalTokenBaseline")
    # Alone in its group: the returns themselves. The last token pays for its own KL, not for that of the first.
    assert found == [0.25, 0.75, 1.0]


SURE = Token(probability=1.0)


def test_for_a_certain_policy_the_baseline_is_the_mean_whatever_the_rounding() -> None:
    rows = [Row(1.0, 0, (SURE, SURE)), Row(0.0, 0, (SURE, SURE))]
    found, _ = found_by([rows], type="OptimalTokenBaseline")
    assert found == pytest.approx([0.5, 0.5, -0.5, -0.5])
    inputs = inputs_of(rows, torch.float32)
    # As float32 may compute them: sums of squares that are off by rounding, in both directions.
    inputs.columns[SQUARES].copy_(torch.tensor([1.0 + 2e-7, 1.0, 1.0 - 1.2e-7, 1.0]))
    for_tokens = estimator_of(type="OptimalTokenBaseline").for_tokens
    assert for_tokens is not None
    assert for_tokens(inputs, OneWorker()).advantages_N.abs().max() <= 1.0


def test_negative_group_numbers_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"groups: ids .*\(got -1\)"):
        found_by([[Row(1.0, -1, (Token(),))]], type="OptimalTokenBaseline")


def test_token_advantages_declare_the_columns_they_need() -> None:
    assert estimator_of(type="GAE").needs == {VALUES, KL_PENALTIES}
    assert estimator_of(type="ReinforcePlusPlus").needs == {KL_PENALTIES}
    assert estimator_of(type="OptimalTokenBaseline").needs == {OLD_LOGPROBS, SQUARES, KL_PENALTIES}
    assert estimator_of(type="Distillation").needs == {OLD_LOGPROBS, REF_LOGPROBS, KL_PENALTIES}
