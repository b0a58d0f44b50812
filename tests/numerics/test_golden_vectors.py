"""Our formulas against numbers that verl 0.9.1 computed on one small batch with holes in its masks.

`golden/verl_core_algos.json` holds the inputs (6 sequences, 4 tokens, groups of 3, 2 and 1) and verl's outputs in 32
bits, rounded to 7 digits, as padded tables; `golden/verl_policy_losses.json` more outputs for the same inputs. What is
masked there does not exist here: it is cut out, holes included.

Legend: B rows, T columns of a table, N tokens that are not masked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import Algorithm, LossAggregation
from rljob_api.v1alpha1.kl import KlEstimator
from rljob_api.v1alpha1.policy_loss import LossType
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.token_rows import flat, rows_of_mask
from rljob_trainer.algorithms.advantages import group_relative_advantages
from rljob_trainer.algorithms.aggregation import Denominators, aggregate_loss, count_denominators
from rljob_trainer.algorithms.interfaces import (
    ROLLOUT_LOGPROBS,
    LossInputs,
    OneWorker,
    PolicyLoss,
    TokenLosses,
    WholeInputs,
)
from rljob_trainer.algorithms.kl import kl_estimate
from rljob_trainer.algorithms.loss_registry import policy_loss
from rljob_trainer.algorithms.policy_losses import clipped_surrogate
from rljob_trainer.algorithms.whitening import whitened

FOLDER = Path(__file__).parent / "golden"
GOLDEN = json.loads((FOLDER / "verl_core_algos.json").read_text())
LOSSES = json.loads((FOLDER / "verl_policy_losses.json").read_text())
INPUTS = GOLDEN["inputs"]
MASK_BT = torch.tensor(INPUTS["mask"])
ROWS = rows_of_mask(MASK_BT)
NUM_TOKENS = int(MASK_BT.sum())
WIDTH = MASK_BT.shape[1]
LOGPROBS_N = flat(torch.tensor(INPUTS["log_prob"]), MASK_BT)
OLD_LOGPROBS_N = flat(torch.tensor(INPUTS["old_log_prob"]), MASK_BT)
REWARDS_B = torch.tensor(INPUTS["token_level_rewards"]).sum(dim=1)
GROUPS_B = torch.tensor([ord(uid) for uid in INPUTS["uid"]])


def assert_matches(actual_N: Tensor, golden_BT: object) -> None:
    torch.testing.assert_close(actual_N, flat(torch.tensor(golden_BT), MASK_BT), rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize(
    ("name", "normalize_by_std"), [("grpo", True), ("grpo_vectorized", True), ("grpo no std (Dr.GRPO)", False)]
)
def test_group_relative_advantages(name: str, normalize_by_std: bool) -> None:
    advantages_B = group_relative_advantages(REWARDS_B, GROUPS_B, normalize_by_std=normalize_by_std)
    assert_matches(ROWS.spread(advantages_B), GOLDEN["advantages"][name])


def test_whitening() -> None:
    values_N = flat(torch.tensor(INPUTS["values"]), MASK_BT)
    assert_matches(whitened(values_N, OneWorker()), GOLDEN["masked_whiten(values)"])


KL_ESTIMATES = {
    "k1": (KlEstimator.K1, False),
    "k2": (KlEstimator.K2, False),
    "k3": (KlEstimator.K3, False),
    "abs": (KlEstimator.ABSOLUTE, False),
    "k1+": (KlEstimator.K1, True),
    "k2+": (KlEstimator.K2, True),
    "k3+": (KlEstimator.K3, True),
}


@pytest.mark.parametrize("name", KL_ESTIMATES)
def test_kl_estimates_and_their_gradients(name: str) -> None:
    golden = (GOLDEN["kl"] | LOSSES["kl"])[name]
    estimator, straight_through = KL_ESTIMATES[name]
    # All tokens, as verl estimates masked ones, too.
    logprobs_BT = torch.tensor(INPUTS["log_prob"], requires_grad=True)
    reference_BT = torch.tensor(INPUTS["ref_log_prob"])
    estimate_BT = kl_estimate(logprobs_BT, reference_BT, estimator, straight_through=straight_through)
    torch.testing.assert_close(estimate_BT.detach(), torch.tensor(golden["value"]), rtol=1e-6, atol=2e-7)
    torch.autograd.backward((estimate_BT * MASK_BT).sum())
    assert logprobs_BT.grad is not None
    torch.testing.assert_close(logprobs_BT.grad, torch.tensor(golden["grad_of_masked_sum"]), rtol=1e-6, atol=2e-7)


AGGREGATIONS = {
    "token-mean": LossAggregation.TOKEN_MEAN,
    "token-sum": LossAggregation.TOKEN_SUM,
    "seq-mean-token-sum": LossAggregation.SEQUENCE_MEAN_TOKEN_SUM,
    "seq-mean-token-mean": LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN,
    "seq-mean-token-sum-norm": LossAggregation.SEQUENCE_MEAN_TOKEN_SUM_NORM,
}


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("is_global", [False, True])
def test_aggregation(name: str, is_global: bool) -> None:
    losses_N = LOGPROBS_N - OLD_LOGPROBS_N
    denominators = Denominators(40, 12) if is_global else count_denominators(ROWS)
    dp_size = 2 if is_global else 1
    # Unless it is told otherwise, verl takes the width of the table for the limit of new tokens.
    part = aggregate_loss(losses_N, ROWS, AGGREGATIONS[name], denominators, dp_size, max_new_tokens=WIDTH)
    golden = (GOLDEN["agg_loss"] | LOSSES["agg_loss"])[
        f"{name} | " + ("global dp=2 tokens=40 gbs=12" if is_global else "local")
    ]
    assert part.item() == pytest.approx(golden, rel=1e-5)


def test_aggregation_with_a_limit_of_new_tokens() -> None:
    aggregation = LossAggregation.SEQUENCE_MEAN_TOKEN_SUM_NORM
    part = aggregate_loss(LOGPROBS_N - OLD_LOGPROBS_N, ROWS, aggregation, Denominators(40, 12), 2, max_new_tokens=100)
    golden = GOLDEN["agg_loss"]["seq-mean-token-sum-norm | global+scale=100"]
    assert part.item() == pytest.approx(golden, rel=1e-5)


def check_loss(golden: dict[str, object], found: TokenLosses, logprobs_N: Tensor, aggregation: LossAggregation) -> None:
    """Of the mini-batch of all rows, with its gradient."""
    loss = aggregate_loss(found.losses_N, ROWS, aggregation, count_denominators(ROWS), 1, max_new_tokens=WIDTH)
    assert loss.item() == pytest.approx(golden["loss"], rel=1e-5)
    torch.autograd.backward(loss)
    assert logprobs_N.grad is not None
    assert_matches(logprobs_N.grad, golden["grad"])


def per_token(found: TokenLosses, name: str) -> float:
    return found.sums[name].item() / NUM_TOKENS


@pytest.mark.parametrize(
    ("name", "clip_ratio_high", "aggregation"),
    [
        ("vanilla", 0.2, LossAggregation.TOKEN_MEAN),
        ("vanilla clip-higher 0.2/0.28", 0.28, LossAggregation.TOKEN_MEAN),
        ("vanilla seq-mean-token-mean", 0.2, LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN),
    ],
)
def test_clipped_surrogate(name: str, clip_ratio_high: float, aggregation: LossAggregation) -> None:
    golden = GOLDEN["policy_loss"][name]
    logprobs_N = LOGPROBS_N.clone().requires_grad_()
    found = clipped_surrogate(
        logprobs_N,
        OLD_LOGPROBS_N,
        ROWS.spread(group_relative_advantages(REWARDS_B, GROUPS_B)),
        clip_ratio_low=0.2,
        clip_ratio_high=clip_ratio_high,
        dual_clip_ratio=3.0,
    )
    check_loss(golden, found, logprobs_N, aggregation)
    metrics = golden["metrics"]
    assert per_token(found, "pg_clipfrac") == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)
    assert per_token(found, "pg_clipfrac_lower") == metrics["actor/pg_clipfrac_lower"]
    assert per_token(found, "ppo_kl") == pytest.approx(metrics["actor/ppo_kl"], abs=1e-6)


def named_loss(wire: dict[str, object]) -> PolicyLoss:
    return policy_loss(resolve_algorithm(Algorithm.from_wire({"loss": wire})))


MEAN, BY_SEQUENCE = LossAggregation.TOKEN_MEAN, LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN
BOTH = {"clipRatioLow": 0.2, "clipRatioHigh": 0.2}
LOSS_CASES: dict[str, tuple[dict[str, object], LossAggregation]] = {
    "dppo_tv": (
        {"type": "DPPO", "dppo": {"thresholdLow": 0.2, "thresholdHigh": 0.2, "maxRatio": 3}}, MEAN),
    "dppo_kl": (
        {"type": "DPPO", "dppo": {"divergence": "KL", "thresholdLow": 0.2, "thresholdHigh": 0.2, "maxRatio": 3}},
        MEAN),
    "dppo_tv 0.15 c=20": ({"type": "DPPO"}, MEAN),
    "dppo_kl 0.05 c=20": ({"type": "DPPO", "dppo": {"divergence": "KL"}}, MEAN),
    "gspo": ({"type": "GSPO", "gspo": BOTH}, BY_SEQUENCE),
    "gspo token-mean": ({"type": "GSPO", "gspo": BOTH}, MEAN),
    "gspo clip 3e-4/4e-4": ({"type": "GSPO"}, BY_SEQUENCE),
    "sapo": ({"type": "SAPO"}, BY_SEQUENCE),
    "sapo tau 2/0.5": ({"type": "SAPO", "sapo": {"temperaturePositive": 2, "temperatureNegative": 0.5}}, BY_SEQUENCE),
    "gpg": ({"type": "GPG"}, MEAN),
    "cispo": ({"type": "CISPO", "cispo": BOTH}, MEAN),
    "cispo low=1 high=1": ({"type": "CISPO", "cispo": {"clipRatioHigh": 1}}, MEAN),
    # verl takes the mean over rows here whatever it is told.
    "geo_mean": ({"type": "GMPO", "gmpo": {"clipLogRatioLow": 0.2, "clipLogRatioHigh": 0.2}}, BY_SEQUENCE),
    "geo_mean 0.4": ({"type": "GMPO"}, BY_SEQUENCE),
    "dro beta=0.5": ({"type": "DRO", "dro": {"beta": 0.5}}, MEAN),
    "kl_cov": ({"type": "KLCov", "klCov": {"coefficient": 0.1}}, MEAN),
    "kl_cov share=0.2 coef=1": ({"type": "KLCov", "klCov": {"tokenShare": 0.2}}, MEAN),
    "clip_cov none in range": ({"type": "ClipCov"}, MEAN),
    "clip_cov all in (0.05, 0.5)": (
        {"type": "ClipCov", "clipCov": {"tokenShare": 1, "covarianceLow": 0.05, "covarianceHigh": 0.5}}, MEAN),
    "clip_cov one in (0.27, 0.28)": (
        {"type": "ClipCov", "clipCov": {"covarianceLow": 0.27, "covarianceHigh": 0.28}}, MEAN),
}  # fmt: skip
"""Of Clip-Cov those in which verl draws no random numbers, or they do not matter."""
SUMS_OF = {
    "actor/pg_clipfrac": {
        "GSPO": "pg_clipfrac",
        "CISPO": "pg_clipfrac",
        "DPPO": "pg_clipfrac",
        "ClipCov": "pg_cov_frac",
    },
    "actor/pg_clipfrac_lower": {"DPPO": "pg_ratio_bounded"},
}
"""verl's metrics by our names."""


@pytest.mark.parametrize("name", LOSS_CASES)
def test_policy_losses_and_their_gradients(name: str) -> None:
    wire, aggregation = LOSS_CASES[name]
    golden, loss = LOSSES["policy_loss"][name], named_loss(wire)
    logprobs_N = LOGPROBS_N.clone().requires_grad_()
    advantages_N = ROWS.spread(group_relative_advantages(REWARDS_B, GROUPS_B))
    columns = {ROLLOUT_LOGPROBS: OLD_LOGPROBS_N}
    whole: Mapping[str, Tensor] = {}
    if loss.whole_pass is not None:
        seen = WholeInputs(ROWS, LOGPROBS_N, OLD_LOGPROBS_N, advantages_N, columns)
        whole = loss.whole_pass(seen, OneWorker())
    found = loss.compute(LossInputs(ROWS, logprobs_N, OLD_LOGPROBS_N, advantages_N, columns, whole=whole))
    check_loss(golden, found, logprobs_N, aggregation)
    for metric, value in golden["metrics"].items():
        if ours := SUMS_OF.get(metric, {}).get(str(wire["type"])):
            assert per_token(found, ours) == pytest.approx(value, abs=1e-6)
    if wire["type"] != "KLCov":
        assert per_token(found, "ppo_kl") == pytest.approx(-0.0383333, abs=1e-6)


def test_every_loss_has_golden_numbers() -> None:
    assert {wire["type"] for wire, _ in LOSS_CASES.values()} == set(LossType) - {LossType.CLIPPED, LossType.FUNCTION}
    assert set(LOSS_CASES) == set(LOSSES["policy_loss"])
