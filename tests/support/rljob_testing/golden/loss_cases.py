"""Compares policy losses, the value loss, KL estimates and aggregations with verl's numbers.

Legend: B rows, T columns of a table, N tokens that are not masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import Algorithm, LossAggregation
from rljob_api.v1alpha1.kl import KlEstimator
from rljob_api.v1alpha1.policy_loss import Clipped
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.golden import advantage_cases, verl_cases
from rljob_trainer.algorithms.aggregation import Denominators, aggregate_loss, count_denominators
from rljob_trainer.algorithms.interfaces import ROLLOUT_LOGPROBS, LossInputs, OneWorker, TokenLosses, WholeInputs
from rljob_trainer.algorithms.kl import kl_estimate
from rljob_trainer.algorithms.loss_registry import policy_loss
from rljob_trainer.algorithms.policy_losses import clipped_surrogate
from rljob_trainer.algorithms.value_losses import clipped_value_loss

KL_ESTIMATES = {
    "k1": (KlEstimator.K1, False),
    "k2": (KlEstimator.K2, False),
    "k3": (KlEstimator.K3, False),
    "abs": (KlEstimator.ABSOLUTE, False),
    "k1+": (KlEstimator.K1, True),
    "k2+": (KlEstimator.K2, True),
    "k3+": (KlEstimator.K3, True),
}
AGGREGATIONS = {
    "token-mean": LossAggregation.TOKEN_MEAN,
    "token-sum": LossAggregation.TOKEN_SUM,
    "seq-mean-token-sum": LossAggregation.SEQUENCE_MEAN_TOKEN_SUM,
    "seq-mean-token-mean": LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN,
    "seq-mean-token-sum-norm": LossAggregation.SEQUENCE_MEAN_TOKEN_SUM_NORM,
}
WHOLE = Denominators(40, 12)
"""Tokens and rows of a mini-batch that two workers share."""
MEAN, BY_SEQUENCE = LossAggregation.TOKEN_MEAN, LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN
BOTH = {"clipRatioLow": 0.2, "clipRatioHigh": 0.2}
CLIPPED = {"vanilla": (0.2, MEAN), "vanilla clip-higher 0.2/0.28": (0.28, MEAN),
           "vanilla seq-mean-token-mean": (0.2, BY_SEQUENCE)}  # fmt: skip
POLICY_LOSSES: dict[str, tuple[dict[str, object], LossAggregation]] = {
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
    # verl averages over rows here, whatever aggregation is configured.
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
"""For Clip-Cov only cases in which verl draws no random numbers, or in which the draw does not change the result."""
SUMS_OF = {
    "actor/pg_clipfrac": {
        "GSPO": "pg_clipfrac",
        "CISPO": "pg_clipfrac",
        "DPPO": "pg_clipfrac",
        "ClipCov": "pg_cov_frac",
    },
    "actor/pg_clipfrac_lower": {"DPPO": "pg_ratio_bounded"},
}
"""Our name for each of verl's metrics, by loss."""


def _kl(name: str) -> Sequence[verl_cases.Comparison]:
    """KL estimate and its gradient, over all tokens: verl estimates masked tokens too."""
    golden = (verl_cases.GOLDEN["kl"] | verl_cases.LOSSES["kl"])[name]
    estimator, straight_through = KL_ESTIMATES[name]
    logprobs_BT = torch.tensor(verl_cases.INPUTS["log_prob"], requires_grad=True)
    reference_BT = torch.tensor(verl_cases.INPUTS["ref_log_prob"])
    estimate_BT = kl_estimate(logprobs_BT, reference_BT, estimator, straight_through=straight_through)
    torch.autograd.backward((estimate_BT * verl_cases.MASK_BT).sum())
    assert logprobs_BT.grad is not None
    return [
        verl_cases.near("estimate", estimate_BT.detach(), torch.tensor(golden["value"])),
        verl_cases.near("gradient", logprobs_BT.grad, torch.tensor(golden["grad_of_masked_sum"])),
    ]


def _aggregation(name: str, case: str) -> Sequence[verl_cases.Comparison]:
    """By default verl uses the width of the table as the limit of new tokens."""
    losses_N = verl_cases.LOGPROBS_N - verl_cases.OLD_LOGPROBS_N
    width = 100 if case.endswith("scale=100") else verl_cases.WIDTH
    denominators, dp_size = (count_denominators(verl_cases.ROWS), 1) if case == "local" else (WHOLE, 2)
    part = aggregate_loss(losses_N, verl_cases.ROWS, AGGREGATIONS[name], denominators, dp_size, max_new_tokens=width)
    golden = (verl_cases.GOLDEN["agg_loss"] | verl_cases.LOSSES["agg_loss"])[f"{name} | {case}"]
    return [verl_cases.number("loss", part.item(), golden, rtol=1e-5, atol=1e-12)]


def _with_gradient(
    golden: dict[str, object], found: TokenLosses, logprobs_N: Tensor, aggregation: LossAggregation
) -> list[verl_cases.Comparison]:
    """Compares the loss over all rows as one mini-batch, and its gradient."""
    loss = aggregate_loss(
        found.losses_N,
        verl_cases.ROWS,
        aggregation,
        count_denominators(verl_cases.ROWS),
        1,
        max_new_tokens=verl_cases.WIDTH,
    )
    torch.autograd.backward(loss)
    assert logprobs_N.grad is not None
    expected = golden["loss"]
    assert isinstance(expected, float)
    return [
        verl_cases.number("loss", loss.item(), expected, rtol=1e-5, atol=1e-12),
        verl_cases.near("gradient", logprobs_N.grad, verl_cases.tokens_of(golden["grad"])),
    ]


def _per_token(found: TokenLosses, name: str, expected: float, atol: float = 1e-6) -> verl_cases.Comparison:
    return verl_cases.number(name, found.sums[name].item() / verl_cases.NUM_TOKENS, expected, atol=atol)


def _clipped(name: str) -> Sequence[verl_cases.Comparison]:
    clip_ratio_high, aggregation = CLIPPED[name]
    golden = verl_cases.GOLDEN["policy_loss"][name]
    logprobs_N = verl_cases.LOGPROBS_N.clone().requires_grad_()
    settings = Clipped(clip_ratio_low=0.2, clip_ratio_high=clip_ratio_high, dual_clip_ratio=3.0)
    advantages_N = advantage_cases.of_responses({"type": "GroupRelative"})
    found = clipped_surrogate(
        LossInputs(verl_cases.ROWS, logprobs_N, verl_cases.OLD_LOGPROBS_N, advantages_N), settings
    )
    metrics = golden["metrics"]
    return [
        *_with_gradient(golden, found, logprobs_N, aggregation),
        _per_token(found, "pg_clipfrac", metrics["actor/pg_clipfrac"]),
        _per_token(found, "pg_clipfrac_lower", metrics["actor/pg_clipfrac_lower"], atol=0.0),
        _per_token(found, "ppo_kl", metrics["actor/ppo_kl"]),
    ]


def _policy_loss(name: str) -> Sequence[verl_cases.Comparison]:
    wire, aggregation = POLICY_LOSSES[name]
    golden, loss = (
        verl_cases.LOSSES["policy_loss"][name],
        policy_loss(resolve_algorithm(Algorithm.from_wire({"loss": wire}))),
    )
    logprobs_N = verl_cases.LOGPROBS_N.clone().requires_grad_()
    advantages_N = advantage_cases.of_responses({"type": "GroupRelative"})
    columns = {ROLLOUT_LOGPROBS: verl_cases.OLD_LOGPROBS_N}
    whole: Mapping[str, Tensor] = {}
    if loss.whole_pass is not None:
        seen = WholeInputs(verl_cases.ROWS, verl_cases.LOGPROBS_N, verl_cases.OLD_LOGPROBS_N, advantages_N, columns)
        whole = loss.whole_pass(seen, OneWorker())
    found = loss.compute(
        LossInputs(verl_cases.ROWS, logprobs_N, verl_cases.OLD_LOGPROBS_N, advantages_N, columns, whole=whole)
    )
    compared = _with_gradient(golden, found, logprobs_N, aggregation)
    for metric, value in golden["metrics"].items():
        if ours := SUMS_OF.get(metric, {}).get(str(wire["type"])):
            compared.append(_per_token(found, ours, value))
    if wire["type"] != "KLCov":
        compared.append(_per_token(found, "ppo_kl", -0.0383333))
    return compared


def _value_loss() -> Sequence[verl_cases.Comparison]:
    golden = verl_cases.GOLDEN["value_loss"]
    values_N, returns_N = verl_cases.tokens_of(golden["vpreds"]), verl_cases.tokens_of(golden["returns"])
    found = clipped_value_loss(values_N, verl_cases.VALUES_N, returns_N, golden["cliprange"])
    share = found.sums["vf_clipfrac"].item() / verl_cases.NUM_TOKENS
    return [
        verl_cases.number("loss", found.losses_N.mean().item(), golden["loss"], rtol=1e-6, atol=1e-12),
        verl_cases.number("vf_clipfrac", share, golden["clipfrac"], rtol=1e-6, atol=1e-12),
        verl_cases.number("vpred_mean", found.sums["vpred_mean"].item(), values_N.sum().item(), rtol=1e-6, atol=1e-12),
    ]


_PLACES = ("local", "global dp=2 tokens=40 gbs=12")
KL_CASES = tuple(
    verl_cases.GoldenCase(
        f"KL {KL_ESTIMATES[name][0]}{', straight through' * KL_ESTIMATES[name][1]}", name, partial(_kl, name)
    )
    for name in KL_ESTIMATES
)
AGGREGATION_CASES = (
    *(
        verl_cases.GoldenCase(f"aggregation {AGGREGATIONS[name]}", place, partial(_aggregation, name, place))
        for name in AGGREGATIONS
        for place in _PLACES
    ),
    verl_cases.GoldenCase(
        f"aggregation {LossAggregation.SEQUENCE_MEAN_TOKEN_SUM_NORM}",
        "a limit of new tokens",
        partial(_aggregation, "seq-mean-token-sum-norm", "global+scale=100"),
    ),
)
CLIPPED_CASES = tuple(verl_cases.GoldenCase("loss Clipped", name, partial(_clipped, name)) for name in CLIPPED)
POLICY_LOSS_CASES = tuple(
    verl_cases.GoldenCase(f"loss {wire['type']}", name, partial(_policy_loss, name))
    for name, (wire, _) in POLICY_LOSSES.items()
)
VALUE_LOSS_CASE = verl_cases.GoldenCase("loss of the critic", "clipped", _value_loss)
LOSS_CASES = (*CLIPPED_CASES, *POLICY_LOSS_CASES, VALUE_LOSS_CASE, *KL_CASES, *AGGREGATION_CASES)
