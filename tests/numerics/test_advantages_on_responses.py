"""Advantages on one reward per response against slow loops, and edge cases worked out by hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_trainer.algorithms.advantage_registry import advantage_estimator
from rljob_trainer.algorithms.interfaces import GREEDY_REWARDS, NAMED_REWARDS, AdvantageEstimator, ResponseInputs


@dataclass(frozen=True)
class Response:
    reward: float
    group: int
    length: int
    greedy: float = 0.0
    style: float = 0.0
    is_trained: bool = True


WEIGHTS = {"accuracy": 1.0, "style": 0.25}
# Eighths, so that equal sums of rewards are equal in every order.
REWARD = st.integers(min_value=-16, max_value=16).map(lambda eighths: eighths / 8)
RESPONSES = st.lists(
    st.builds(
        Response,
        reward=REWARD,
        group=st.integers(min_value=-2, max_value=3),
        length=st.sampled_from([0, 1, 2, 3, 7, 500]),
        greedy=REWARD,
        style=REWARD,
        is_trained=st.booleans(),
    ),
    min_size=1,
    max_size=16,
)


def estimator_of(**advantage: object) -> AdvantageEstimator:
    return advantage_estimator(resolve_algorithm(Algorithm.from_wire({"advantage": advantage})))


def advantages(responses: list[Response], dtype: torch.dtype = torch.float64, **advantage: object) -> list[float]:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    rewards_B = column([each.reward for each in responses])
    inputs = ResponseInputs(
        rewards_B,
        torch.tensor([each.group for each in responses]),
        torch.tensor([each.length for each in responses]),
        is_trained_B=torch.tensor([each.is_trained for each in responses]),
        greedy_rewards_B=column([each.greedy for each in responses]),
        named_rewards={"accuracy": rewards_B, "style": column([each.style for each in responses])},
        reward_weights=WEIGHTS,
    )
    for_responses = estimator_of(**advantage).for_responses
    assert for_responses is not None
    found_B = for_responses(inputs)
    assert found_B.dtype == dtype
    return found_B.tolist()


def peers(responses: list[Response], of: Response) -> list[Response]:
    return [each for each in responses if each.group == of.group]


def mean_or_0(rewards: list[float]) -> float:
    return statistics.fmean(rewards) if len(rewards) > 1 else 0.0


def std_or_1(rewards: list[float]) -> float:
    return statistics.stdev(rewards) if len(rewards) > 1 else 1.0


def slow_whitened(values: list[float], responses: list[Response]) -> list[float]:
    """Token by token, over those that are trained on."""
    pairs = zip(values, responses, strict=True)
    tokens = [value for value, each in pairs if each.is_trained for _ in range(each.length)]
    mean = statistics.fmean(tokens) if tokens else 0.0
    variance = statistics.variance(tokens) if len(tokens) > 1 else 0.0
    # A single token is centred, and has no variance.
    return [(value - mean) / (variance + 1e-8) ** 0.5 for value in values]


def slow_pass_at_k(responses: list[Response], by_std: bool) -> list[float]:
    found = [0.0] * len(responses)
    for group in {each.group for each in responses}:
        indices = [index for index, each in enumerate(responses) if each.group == group]
        rewards = [responses[index].reward for index in indices]
        best = indices[rewards.index(max(rewards))]
        others = [responses[index].reward for index in indices if index != best]
        found[best] = max(rewards) - (max(others) if others else 0.0)
        if by_std:
            found[best] /= std_or_1(rewards) + 1e-6
    return found


def slow_gdpo(responses: list[Response]) -> list[float]:
    summed = []
    for each in responses:
        own = peers(responses, each)
        parts = []
        for name, read in (("accuracy", lambda r: r.reward), ("style", lambda r: r.style)):
            rewards = [read(peer) for peer in own]
            parts.append(WEIGHTS[name] * (read(each) - mean_or_0(rewards)) / (std_or_1(rewards) + 1e-6))
        summed.append(sum(parts))
    return slow_whitened(summed, responses)


def slow_leave_one_out(responses: list[Response]) -> list[float]:
    found = []
    for index, each in enumerate(responses):
        others = [r.reward for other, r in enumerate(responses) if other != index and r.group == each.group]
        found.append(each.reward - (statistics.fmean(others) if others else 0.0))
    return found


def slow_opo(responses: list[Response]) -> list[float]:
    found = []
    for each in responses:
        own = peers(responses, each)
        tokens = [peer.reward for peer in own for _ in range(peer.length)]
        found.append(each.reward - (statistics.fmean(tokens) if len(own) > 1 and tokens else 0.0))
    return found


def slow_gpg(responses: list[Response]) -> list[float]:
    rewards = [[peer.reward for peer in peers(responses, each)] for each in responses]
    num_learned = sum(len(own) == 1 or len(set(own)) > 1 for own in rewards)
    alpha = len(responses) / max(1, num_learned)
    return [alpha * (each.reward - mean_or_0(own)) for each, own in zip(responses, rewards, strict=True)]


def slow_baseline(responses: list[Response]) -> list[float]:
    centered = [each.reward - mean_or_0([peer.reward for peer in peers(responses, each)]) for each in responses]
    return slow_whitened(centered, responses)


SLOW: dict[str, tuple[dict[str, object], Callable[[list[Response]], list[float]]]] = {
    "pass at k": ({"type": "GroupRelativePassAtK"}, lambda responses: slow_pass_at_k(responses, True)),
    "pass at k, no std": (
        {"type": "GroupRelativePassAtK", "groupRelativePassAtK": {"normalizeByStd": False}},
        lambda responses: slow_pass_at_k(responses, False),
    ),
    "GDPO": ({"type": "GDPO"}, slow_gdpo),
    "leave one out": ({"type": "LeaveOneOut"}, slow_leave_one_out),
    "REINFORCE++ baseline": ({"type": "ReinforcePlusPlusBaseline"}, slow_baseline),
    "ReMax": ({"type": "ReMax"}, lambda responses: [each.reward - each.greedy for each in responses]),
    "OPO": ({"type": "OPO"}, slow_opo),
    "GPG": ({"type": "GPG"}, slow_gpg),
}


@pytest.mark.parametrize("name", SLOW)
@given(responses=RESPONSES)
def test_advantages_equal_a_loop_over_responses(name: str, responses: list[Response]) -> None:
    advantage, slow = SLOW[name]
    found = advantages(responses, **advantage)
    assert found == pytest.approx(slow(responses), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", SLOW)
def test_equal_rewards_that_are_not_binary_fractions_give_zero_advantages(name: str) -> None:
    responses = [Response(0.1, group=index // 7, length=index % 5, greedy=0.1, style=0.1) for index in range(21)]
    found = advantages(responses, torch.float32, **SLOW[name][0])
    assert max(map(abs, found)) < 1e-9


def test_only_the_best_response_of_a_group_contributes_to_pass_at_k() -> None:
    tied = [Response(reward, 0, 1) for reward in (1.0, 0.25, 1.0)]
    assert advantages(tied, type="GroupRelativePassAtK") == [0.0, 0.0, 0.0]
    # 1 - 0.25 for the best; the standard deviation of 0.25, 1, 0.25 is sqrt(3) / 4.
    one = [Response(reward, 7, 1) for reward in (0.25, 1.0, 0.25)]
    assert advantages(one, type="GroupRelativePassAtK") == pytest.approx([0.0, 3**0.5, 0.0], rel=1e-5)


def test_gpg_compensates_for_groups_that_are_all_right_or_all_wrong() -> None:
    rewards = {0: (1.0, 1.0), 1: (0.0, 0.0), 2: (1.0, 0.0), 3: (0.5, 1.0)}
    responses = [Response(reward, group, 1) for group, pair in rewards.items() for reward in pair]
    # 4 of 8 responses have a gradient: twice the difference from the mean.
    assert advantages(responses, type="GPG") == [0.0, 0.0, 0.0, 0.0, 1.0, -1.0, -0.5, 0.5]


def test_gdpo_keeps_a_small_reward_beside_a_large_one() -> None:
    """The sum of the rewards would hide the small one: rewards 100 apart and 1 apart count the same."""
    responses = [
        Response(0.0, 0, 4, style=0.0),
        Response(0.0, 0, 4, style=1.0),
        Response(100.0, 0, 4, style=0.0),
        Response(100.0, 0, 4, style=1.0),
    ]
    found = advantages(responses, type="GDPO")
    # With weights 1 and 1/4, style moves a response by a quarter of what accuracy does.
    assert found[1] - found[0] == pytest.approx((found[2] - found[0]) / 4, rel=1e-4)
    assert sum(found) == pytest.approx(0.0, abs=1e-9)


def test_the_baseline_of_opo_is_weighted_by_tokens() -> None:
    # (1 x 1 + 3 x 0) / 4 = 1/4.
    assert advantages([Response(1.0, 0, 1), Response(0.0, 0, 3)], type="OPO") == [0.75, -0.25]


@pytest.mark.parametrize("estimator", ["ReinforcePlusPlusBaseline", "GDPO"])
def test_whitening_uses_only_trained_responses(estimator: str) -> None:
    """Truncated responses are compared with the others only."""
    cut_off = [Response(0.0, group, 4000, is_trained=False) for group in (0, 0, 1, 1)]
    learned = [Response(1.0, 0, 10), Response(0.0, 0, 30), Response(1.0, 1, 20), Response(1.0, 1, 20)]
    found = advantages([*cut_off, *learned], type=estimator)[len(cut_off) :]
    tokens = [value for value, each in zip(found, learned, strict=True) for _ in range(each.length)]
    assert statistics.fmean(tokens) == pytest.approx(0.0, abs=1e-6)
    assert statistics.stdev(tokens) == pytest.approx(1.0, abs=1e-6)


def test_an_advantage_declares_the_columns_it_needs_beside_the_reward() -> None:
    assert estimator_of(type="ReMax").needs == {GREEDY_REWARDS}
    assert estimator_of(type="GDPO").needs == {NAMED_REWARDS}
    assert estimator_of(type="OPO").needs == frozenset()
    bare = ResponseInputs(torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
    for type_ in ("ReMax", "GDPO"):
        for_responses = estimator_of(type=type_).for_responses
        assert for_responses is not None
        with pytest.raises(AssertionError, match=type_):
            for_responses(bare)
