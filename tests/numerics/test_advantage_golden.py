"""Every advantage against numbers that verl 0.9.1 computed; `test_golden_vectors` says what the file holds.

verl pads, and its masks may have holes, which do not exist here. Where it differs on purpose, the test says so. The
numbers for `squares` were computed later, because no distribution has probabilities of 0.9 whose squares add up to 0.4
(`sum_pi_squared`).

Legend: B rows, T columns of a table, N tokens that are not masked.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.token_rows import flat, rows_of_mask
from rljob_trainer.algorithms.advantage_registry import advantage_estimator
from rljob_trainer.algorithms.interfaces import (
    KL_PENALTIES,
    OLD_LOGPROBS,
    SQUARES,
    VALUES,
    OneWorker,
    ResponseInputs,
    TokenAdvantages,
    TokenInputs,
)
from rljob_trainer.algorithms.token_advantages import discounted_returns

GOLDEN = json.loads((Path(__file__).parent / "golden" / "verl_core_algos.json").read_text())
INPUTS = GOLDEN["inputs"]
MASK_BT = torch.tensor(INPUTS["mask"])
ROWS = rows_of_mask(MASK_BT)
REWARDS_B = torch.tensor(INPUTS["token_level_rewards"]).sum(dim=1)
GROUPS_B = torch.tensor([ord(uid) - ord("a") for uid in INPUTS["uid"]])
OF_A_GROUP_B = torch.tensor([True] * 5 + [False])
"""The last row is a group by itself."""
COLUMNS = {
    VALUES: flat(torch.tensor(INPUTS["values"]), MASK_BT),
    OLD_LOGPROBS: flat(torch.tensor(INPUTS["old_log_prob"]), MASK_BT),
    SQUARES: flat(torch.tensor(INPUTS["squares"]), MASK_BT),
    KL_PENALTIES: torch.zeros(ROWS.num_values),
}
TOKENS = TokenInputs(REWARDS_B, GROUPS_B, ROWS, COLUMNS)


def golden(kind: str, name: str) -> Tensor:
    return flat(torch.tensor(GOLDEN[kind][name]), MASK_BT)


def assert_close(actual_N: Tensor, expected_N: Tensor) -> None:
    torch.testing.assert_close(actual_N, expected_N, rtol=1e-5, atol=1e-6)


def of_responses(advantage: dict[str, object]) -> Tensor:
    """[N], by the estimator of a job."""
    estimator = advantage_estimator(resolve_algorithm(Algorithm.from_wire({"advantage": advantage})))
    assert estimator.for_responses is not None
    inputs = ResponseInputs(
        REWARDS_B,
        GROUPS_B,
        ROWS.lengths_B,
        greedy_rewards_B=torch.tensor(INPUTS["reward_baselines"]),
        named_rewards={"score": REWARDS_B},
        reward_weights={"score": 3.0},
    )
    return ROWS.spread(estimator.for_responses(inputs))


def of_tokens(advantage: dict[str, object]) -> TokenAdvantages:
    estimator = advantage_estimator(resolve_algorithm(Algorithm.from_wire({"advantage": advantage})))
    assert estimator.for_tokens is not None
    assert estimator.needs <= set(COLUMNS)
    return estimator.for_tokens(TOKENS, OneWorker())


@pytest.mark.parametrize(
    ("advantage", "name"),
    [
        ("LeaveOneOut", "rloo"),
        ("OPO", "opo"),
        ("ReinforcePlusPlusBaseline", "reinforce_plus_plus_baseline"),
        ("ReMax", "remax"),
        # Of a single reward the weight is whitened away.
        ("GDPO", "gdpo (fallback single reward)"),
    ],
)
def test_on_responses(advantage: str, name: str) -> None:
    assert_close(of_responses({"type": advantage}), golden("advantages", name))


def test_leave_one_out_where_groups_have_others() -> None:
    kept_N = ROWS.spread(OF_A_GROUP_B)
    found_N = of_responses({"type": "LeaveOneOut"})
    assert_close(found_N[kept_N], golden("advantages", "rloo_vectorized")[kept_N])


def test_gpg_scales_by_what_has_a_gradient_and_verl_by_rewards_other_than_0() -> None:
    # All groups can be learned from: a factor of 1. verl sees one reward of 0 among 6: 6 / 5.
    assert_close(1.2 * of_responses({"type": "GPG"}), golden("advantages", "gpg"))


def test_pass_at_k() -> None:
    kept_N = ROWS.spread(OF_A_GROUP_B)
    expected_BT = torch.tensor([*GOLDEN["advantages"]["grpo_passk rows0-4"], [0.0] * 4])
    found_N = of_responses({"type": "GroupRelativePassAtK"})
    assert_close(found_N[kept_N], flat(expected_BT, MASK_BT)[kept_N])


@pytest.mark.parametrize(("name", "gamma", "lambda_"), [("gae g=1 lam=1", 1.0, 1.0), ("gae g=0.9 lam=0.95", 0.9, 0.95)])
def test_gae(name: str, gamma: float, lambda_: float) -> None:
    found = of_tokens({"type": "GAE", "gae": {"gamma": gamma, "lambda": lambda_}})
    assert_close(found.advantages_N, golden("advantages", name))
    assert found.returns_N is not None
    assert_close(found.returns_N, golden("returns", name))


@pytest.mark.parametrize(("name", "gamma"), [("reinforce_plus_plus g=1", 1.0), ("reinforce_plus_plus g=0.9", 0.9)])
def test_reinforce_plus_plus(name: str, gamma: float) -> None:
    found = of_tokens({"type": "ReinforcePlusPlus", "reinforcePlusPlus": {"gamma": gamma}})
    assert_close(found.advantages_N, golden("advantages", name))


@pytest.mark.parametrize(
    ("name", "gamma"), [("reinforce_plus_plus g=0.9", 0.9), ("remax", 1.0), ("optimal_token_baseline", 1.0)]
)
def test_discounted_returns(name: str, gamma: float) -> None:
    assert_close(discounted_returns(TOKENS, gamma=gamma), golden("returns", name))


@pytest.mark.parametrize(("zero_tail", "name"), [(True, "squares"), (False, "squares, tail")])
def test_optimal_token_baseline(zero_tail: bool, name: str) -> None:
    advantage = {"type": "OptimalTokenBaseline", "optimalTokenBaseline": {"zeroTail": zero_tail}}
    found_N = of_tokens(advantage).advantages_N
    assert_close(found_N, golden("advantages", f"tir_optimal_token_baseline | {name}"))
    if zero_tail:
        # The other form compares columns of the table, so that a hole moves what stands behind it, for its group, too.
        kept_N = ROWS.spread(GROUPS_B != 1)
        assert_close(found_N[kept_N], golden("advantages", "optimal_token_baseline | squares")[kept_N])
