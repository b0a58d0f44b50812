"""Our formulas against numbers that verl 0.9.1 computed on one small batch with holes in its masks.

`golden/verl_core_algos.json` holds the inputs (6 sequences, 4 tokens, groups of 3, 2 and 1) and verl's outputs in 32
bits, rounded to 7 digits.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import KlEstimator, LossAggregation
from rljob_trainer.algorithms.advantages import group_relative_advantages
from rljob_trainer.algorithms.aggregation import Denominators, aggregate_loss, count_denominators
from rljob_trainer.algorithms.kl import kl_estimate
from rljob_trainer.algorithms.policy_losses import clipped_surrogate

GOLDEN = json.loads((Path(__file__).parent / "golden" / "verl_core_algos.json").read_text())
INPUTS = GOLDEN["inputs"]
MASK_BT = torch.tensor(INPUTS["mask"])
LOGPROBS_BT = torch.tensor(INPUTS["log_prob"])
OLD_LOGPROBS_BT = torch.tensor(INPUTS["old_log_prob"])
REFERENCE_LOGPROBS_BT = torch.tensor(INPUTS["ref_log_prob"])
REWARDS_B = torch.tensor(INPUTS["token_level_rewards"]).sum(dim=1)
GROUPS_B = torch.tensor([ord(uid) for uid in INPUTS["uid"]])


def assert_matches(actual: Tensor, golden: object) -> None:
    torch.testing.assert_close(actual, torch.tensor(golden), rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize(
    ("name", "normalize_by_std"), [("grpo", True), ("grpo_vectorized", True), ("grpo no std (Dr.GRPO)", False)]
)
def test_group_relative_advantages(name: str, normalize_by_std: bool) -> None:
    advantages_B = group_relative_advantages(REWARDS_B, GROUPS_B, normalize_by_std=normalize_by_std)
    assert_matches(advantages_B[:, None] * MASK_BT, GOLDEN["advantages"][name])


@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_kl_estimates_and_their_gradients(estimator: KlEstimator) -> None:
    golden = GOLDEN["kl"][estimator.lower()]
    logprobs_BT = LOGPROBS_BT.clone().requires_grad_()
    estimate_BT = kl_estimate(logprobs_BT, REFERENCE_LOGPROBS_BT, estimator)
    assert_matches(estimate_BT.detach(), golden["value"])
    torch.autograd.backward((estimate_BT * MASK_BT).sum())
    assert logprobs_BT.grad is not None
    assert_matches(logprobs_BT.grad, golden["grad_of_masked_sum"])


AGGREGATIONS = {
    "token-mean": LossAggregation.TOKEN_MEAN,
    "seq-mean-token-sum": LossAggregation.SEQUENCE_MEAN_TOKEN_SUM,
    "seq-mean-token-mean": LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN,
}


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("is_global", [False, True])
def test_aggregation(name: str, is_global: bool) -> None:
    loss_BT = LOGPROBS_BT - OLD_LOGPROBS_BT
    denominators = Denominators(40, 12) if is_global else count_denominators(MASK_BT)
    part = aggregate_loss(loss_BT, MASK_BT, AGGREGATIONS[name], denominators, dp_size=2 if is_global else 1)
    golden = GOLDEN["agg_loss"][f"{name} | " + ("global dp=2 tokens=40 gbs=12" if is_global else "local")]
    assert part.item() == pytest.approx(golden, rel=1e-5)


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
    logprobs_BT = LOGPROBS_BT.clone().requires_grad_()
    advantages_B = group_relative_advantages(REWARDS_B, GROUPS_B)
    loss_BT, stats = clipped_surrogate(
        logprobs_BT,
        OLD_LOGPROBS_BT,
        advantages_B[:, None],
        MASK_BT,
        clip_ratio_low=0.2,
        clip_ratio_high=clip_ratio_high,
        dual_clip_ratio=3.0,
    )
    loss = aggregate_loss(loss_BT, MASK_BT, aggregation, count_denominators(MASK_BT), dp_size=1)
    assert loss.item() == pytest.approx(golden["loss"], rel=1e-5)
    torch.autograd.backward(loss)
    assert logprobs_BT.grad is not None
    assert_matches(logprobs_BT.grad, golden["grad"])
    metrics = golden["metrics"]
    assert (stats.num_clipped / stats.num_tokens).item() == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)
    assert (stats.num_dual_clipped / stats.num_tokens).item() == metrics["actor/pg_clipfrac_lower"]
    assert (stats.kl_sum / stats.num_tokens).item() == pytest.approx(metrics["actor/ppo_kl"], abs=1e-6)
