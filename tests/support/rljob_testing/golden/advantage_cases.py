"""Compares every advantage with verl's numbers. Where verl differs on purpose, the case says so.

The numbers for `squares` were computed later: no distribution can have a probability of 0.9 and a sum of squared
probabilities of 0.4 (`sum_pi_squared`).

Legend: B rows, T columns of a table, N tokens that are not masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.golden import verl_cases
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
from rljob_trainer.algorithms.whitening import whitened

OF_A_GROUP_N = verl_cases.ROWS.spread(torch.tensor([True] * 5 + [False]))
"""True for tokens of rows whose group has other rows; the last row is alone in its group."""
OF_FIRST_GROUPS_N = verl_cases.ROWS.spread(verl_cases.GROUPS_B != 1)
COLUMNS = {
    VALUES: verl_cases.VALUES_N,
    OLD_LOGPROBS: verl_cases.OLD_LOGPROBS_N,
    SQUARES: verl_cases.tokens_of(verl_cases.INPUTS["squares"]),
    KL_PENALTIES: torch.zeros(verl_cases.ROWS.num_values),
}
TOKENS = TokenInputs(verl_cases.REWARDS_B, verl_cases.GROUPS_B, verl_cases.ROWS, COLUMNS)


def of_responses(advantage: dict[str, object]) -> Tensor:
    """Advantages per token, [N], of an estimator on responses, configured as in a job."""
    estimator = advantage_estimator(resolve_algorithm(Algorithm.from_wire({"advantage": advantage})))
    assert estimator.for_responses is not None
    inputs = ResponseInputs(
        verl_cases.REWARDS_B,
        verl_cases.GROUPS_B,
        verl_cases.ROWS.lengths_B,
        greedy_rewards_B=torch.tensor(verl_cases.INPUTS["reward_baselines"]),
        named_rewards={"score": verl_cases.REWARDS_B},
        reward_weights={"score": 3.0},
    )
    return verl_cases.ROWS.spread(estimator.for_responses(inputs))


def of_tokens(advantage: dict[str, object]) -> TokenAdvantages:
    """Advantages of an estimator on tokens, configured as in a job."""
    estimator = advantage_estimator(resolve_algorithm(Algorithm.from_wire({"advantage": advantage})))
    assert estimator.for_tokens is not None
    assert estimator.needs <= set(COLUMNS)
    return estimator.for_tokens(TOKENS, OneWorker())


def _case(advantage: str, name: str, **settings: object) -> verl_cases.GoldenCase:
    """A case of an advantage on responses; `settings` are the fields of the advantage's block."""
    return verl_cases.GoldenCase(advantage, name, partial(_on_responses, _wire(advantage, settings), name))


def _wire(advantage: str, settings: dict[str, object]) -> dict[str, object]:
    block = advantage[0].lower() + advantage[1:] if advantage != "GAE" else "gae"
    return {"type": advantage, **({block: settings} if settings else {})}


def _close(what: str, found_N: Tensor, expected_N: Tensor) -> verl_cases.Comparison:
    return verl_cases.Comparison(what, found_N, expected_N, rtol=1e-5, atol=1e-6)


def _golden(name: str, kind: str = "advantages") -> Tensor:
    return verl_cases.tokens_of(verl_cases.GOLDEN[kind][name])


def _on_responses(wire: dict[str, object], name: str) -> Sequence[verl_cases.Comparison]:
    compare = verl_cases.near if wire["type"] == "GroupRelative" else _close
    return [compare("advantages", of_responses(wire), _golden(name))]


def _where_groups_have_others() -> Sequence[verl_cases.Comparison]:
    found_N, expected_N = of_responses({"type": "LeaveOneOut"}), _golden("rloo_vectorized")
    return [_close("advantages", found_N[OF_A_GROUP_N], expected_N[OF_A_GROUP_N])]


def _gpg() -> Sequence[verl_cases.Comparison]:
    """Our GPG scales by the groups that have a gradient, verl's by the nonzero rewards. Here every group has a
    gradient, so our factor is 1; one of verl's six rewards is 0, so its factor is 6 / 5."""
    return [_close("advantages", 1.2 * of_responses({"type": "GPG"}), _golden("gpg"))]


def _pass_at_k() -> Sequence[verl_cases.Comparison]:
    expected_N = verl_cases.tokens_of([*verl_cases.GOLDEN["advantages"]["grpo_passk rows0-4"], [0.0] * 4])
    found_N = of_responses({"type": "GroupRelativePassAtK"})
    return [_close("advantages", found_N[OF_A_GROUP_N], expected_N[OF_A_GROUP_N])]


def _gae(name: str, gamma: float, lambda_: float) -> Sequence[verl_cases.Comparison]:
    found = of_tokens(_wire("GAE", {"gamma": gamma, "lambda": lambda_}))
    assert found.returns_N is not None
    return [
        _close("advantages", found.advantages_N, _golden(name)),
        _close("returns", found.returns_N, _golden(name, "returns")),
    ]


def _reinforce_plus_plus(name: str, gamma: float) -> Sequence[verl_cases.Comparison]:
    found = of_tokens(_wire("ReinforcePlusPlus", {"gamma": gamma}))
    return [_close("advantages", found.advantages_N, _golden(name))]


def _returns(name: str, gamma: float) -> Sequence[verl_cases.Comparison]:
    return [_close("returns", discounted_returns(TOKENS, gamma=gamma), _golden(name, "returns"))]


def _optimal_token_baseline(name: str, zero_tail: bool) -> Sequence[verl_cases.Comparison]:
    found_N = of_tokens(_wire("OptimalTokenBaseline", {"zeroTail": zero_tail})).advantages_N
    compared = [_close("advantages", found_N, _golden(f"tir_optimal_token_baseline | {name}"))]
    if zero_tail:
        # verl's other form works on columns of the table, so a hole in the mask moves all later tokens of its row,
        # which changes the baseline of its whole group. That group is left out here.
        kept_N, expected_N = OF_FIRST_GROUPS_N, _golden("optimal_token_baseline | squares")
        compared.append(_close("advantages of the other form", found_N[kept_N], expected_N[kept_N]))
    return compared


def _whitening() -> Sequence[verl_cases.Comparison]:
    return [
        verl_cases.near(
            "values",
            whitened(verl_cases.VALUES_N, OneWorker()),
            verl_cases.tokens_of(verl_cases.GOLDEN["masked_whiten(values)"]),
        )
    ]


ADVANTAGE_CASES = (
    _case("GroupRelative", "grpo"),
    _case("GroupRelative", "grpo_vectorized"),
    _case("GroupRelative", "grpo no std (Dr.GRPO)", normalizeByStd=False),
    _case("LeaveOneOut", "rloo"),
    verl_cases.GoldenCase("LeaveOneOut", "rloo_vectorized, where groups have others", _where_groups_have_others),
    _case("OPO", "opo"),
    _case("ReinforcePlusPlusBaseline", "reinforce_plus_plus_baseline"),
    _case("ReMax", "remax"),
    # With a single reward its weight has no effect, because the advantages are whitened.
    _case("GDPO", "gdpo (fallback single reward)"),
    verl_cases.GoldenCase("GPG", "gpg", _gpg),
    verl_cases.GoldenCase("GroupRelativePassAtK", "grpo_passk rows0-4", _pass_at_k),
    verl_cases.GoldenCase("GAE", "gae g=1 lam=1", partial(_gae, "gae g=1 lam=1", 1.0, 1.0)),
    verl_cases.GoldenCase("GAE", "gae g=0.9 lam=0.95", partial(_gae, "gae g=0.9 lam=0.95", 0.9, 0.95)),
    verl_cases.GoldenCase("ReinforcePlusPlus", "g=1", partial(_reinforce_plus_plus, "reinforce_plus_plus g=1", 1.0)),
    verl_cases.GoldenCase(
        "ReinforcePlusPlus", "g=0.9", partial(_reinforce_plus_plus, "reinforce_plus_plus g=0.9", 0.9)
    ),
    verl_cases.GoldenCase("discounted returns", "g=0.9", partial(_returns, "reinforce_plus_plus g=0.9", 0.9)),
    verl_cases.GoldenCase("discounted returns", "remax", partial(_returns, "remax", 1.0)),
    verl_cases.GoldenCase(
        "discounted returns", "optimal_token_baseline", partial(_returns, "optimal_token_baseline", 1.0)
    ),
    verl_cases.GoldenCase("OptimalTokenBaseline", "squares", partial(_optimal_token_baseline, "squares", True)),
    verl_cases.GoldenCase(
        "OptimalTokenBaseline", "squares, tail", partial(_optimal_token_baseline, "squares, tail", False)
    ),
    verl_cases.GoldenCase("whitening", "masked_whiten(values)", _whitening),
)
