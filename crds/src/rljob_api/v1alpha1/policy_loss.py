"""The policy loss of each token, a part of the algorithm.

Unset fields have the defaults of their block, with two exceptions: the recipe sets the fields of `Clipped`, and the
thresholds of `Dppo` depend on its divergence.
"""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.rule import required_block_rules, rule
from rljob_api.scalars import NonNegativeNumber, Number, OpenFraction, PositiveNumber, Temperature
from rljob_api.v1alpha1.advantage import Function
from rljob_api.variants import Variants


class LossType(StrEnum):
    """Policy loss of one token as a function of its probability ratio r = exp(logprob - logprob before the updates of
    the step) and its advantage A."""

    CLIPPED = "Clipped"
    """The clipped loss of PPO: max(-A r, -A clip(r)), with optional dual clip."""
    GSPO = "GSPO"
    """The clipped loss with the ratio of the whole response, the geometric mean of its tokens' ratios. The paper's
    aggregation is SequenceMeanTokenMean."""
    CISPO = "CISPO"
    """-clip(r) A logprob: the clipped ratio is a constant weight, so that every token has a gradient."""
    SAPO = "SAPO"
    """A soft gate instead of clipping. The paper's aggregation is SequenceMeanTokenMean."""
    GPG = "GPG"
    """-A logprob: the plain policy gradient."""
    GMPO = "GMPO"
    """The geometric mean of a response's clipped ratios. The paper's aggregation is SequenceMeanTokenMean."""
    CLIP_COV = "ClipCov"
    """The clipped loss, without the gradient of some tokens with a high covariance of logprob and advantage."""
    KL_COV = "KLCov"
    """-A r, with a penalty on the tokens with the highest covariance of logprob and advantage."""
    DPPO = "DPPO"
    """-A r, without tokens whose probability has already moved too far in the direction of A."""
    DRO = "DRO"
    """-A logprob, with the squared log-ratio as a penalty."""
    FUNCTION = "Function"
    """A user-defined function."""


NEEDS_BATCH_STATISTICS = (LossType.CLIP_COV, LossType.KL_COV)
"""Losses that need statistics of the whole mini-batch before each update: one additional forward pass."""
NO_DUAL_CLIP = 0.0
"""Value of `dualClipRatio` that disables the dual clip. If the field is unset, the recipe sets it."""


class Clipped(WireModel):
    """The clipped loss of PPO (Schulman et al. 2017, arXiv 1707.06347). The recipe sets unset fields."""

    clip_ratio_low: PositiveNumber | None = None
    """Distance of the lower clip bound: the probability ratio is clipped at 1 - clipRatioLow, for example 0.2."""
    clip_ratio_high: PositiveNumber | None = None
    """Distance of the upper clip bound: the probability ratio is clipped at 1 + clipRatioHigh, for example 0.28."""
    dual_clip_ratio: NonNegativeNumber | None = None
    """Upper bound of the ratio for negative advantages (dual clip, arXiv 1912.09729): above 1, for example 3.0; 0
    disables it."""


class Gspo(WireModel):
    """Group sequence policy optimization (Zheng et al. 2025, arXiv 2507.18071)."""

    clip_ratio_low: PositiveNumber = 3e-4
    """Distance of the lower clip bound: the ratio of a response is clipped at 1 - clipRatioLow."""
    clip_ratio_high: PositiveNumber = 4e-4
    """Distance of the upper clip bound: the ratio of a response is clipped at 1 + clipRatioHigh. A response's ratio
    changes far less than a token's, so that 0.2 would never clip."""


class Cispo(WireModel):
    """Clipped importance weights (MiniMax 2025, arXiv 2506.13585)."""

    clip_ratio_low: PositiveNumber = 1.0
    """Distance of the lower bound: the weight is at least 1 - clipRatioLow. 1 or more means no lower bound, as in the
    paper."""
    clip_ratio_high: PositiveNumber = 4.0
    """Distance of the upper bound: the weight is at most 1 + clipRatioHigh. The paper gives no value; the default
    bound, 5, is that of ScaleRL (arXiv 2510.13786)."""


class Sapo(WireModel):
    """Soft adaptive policy optimization (Gao et al. 2025, arXiv 2511.20347)."""

    temperature_positive: Temperature = 1.0
    """Temperature of the gate for positive advantages. A higher temperature closes the gate at ratios closer to 1."""
    temperature_negative: Temperature = 1.05
    """Temperature of the gate for advantages of 0 or below."""


class Gmpo(WireModel):
    """Geometric-mean policy optimization (Zhao et al. 2025, arXiv 2507.20673)."""

    clip_log_ratio_low: PositiveNumber = 0.4
    """Lower bound -clipLogRatioLow of a token's log-ratio, for negative advantages."""
    clip_log_ratio_high: PositiveNumber = 0.4
    """Upper bound of a token's log-ratio, for positive advantages."""


class ClipCov(WireModel):
    """Clip-Cov (Cui et al. 2025, arXiv 2505.22617). Needs one additional forward pass per update."""

    clip_ratio_low: PositiveNumber = 0.2
    """Distance of the lower clip bound: the probability ratio is clipped at 1 - clipRatioLow."""
    clip_ratio_high: PositiveNumber = 0.2
    """Distance of the upper clip bound: the probability ratio is clipped at 1 + clipRatioHigh."""
    token_share: OpenFraction = 2e-4
    """Fraction of the mini-batch's tokens that get no gradient, at least one token.

    These tokens are drawn at random from those whose covariance is between covarianceLow and covarianceHigh."""
    covariance_low: Number = 1.0
    """Lower bound of a token's covariance: (logprob - mean logprob) x (advantage - mean advantage), with means over the
    mini-batch."""
    covariance_high: Number = 5.0
    """Upper bound of a token's covariance."""


class KlCov(WireModel):
    """KL-Cov (Cui et al. 2025, arXiv 2505.22617). Needs one additional forward pass per update."""

    token_share: OpenFraction = 2e-4
    """Fraction of the mini-batch's tokens that are penalized, at least one token: those with the highest covariance."""
    coefficient: PositiveNumber = 1.0
    """Weight of the penalty |log-ratio|. The default is the paper's; verl's settings have 0.1."""


class Divergence(StrEnum):
    """Divergence between the old and the new distribution, reduced to two outcomes: the sampled token or any other."""

    TV = "TV"
    """Total variation: the absolute difference of the two probabilities."""
    KL = "KL"
    """KL(old || new), in nats."""


DPPO_THRESHOLDS = {Divergence.TV: 0.15, Divergence.KL: 0.05}
"""Default thresholds: those that the authors of DPPO train with."""


class Dppo(WireModel):
    """Divergence proximal policy optimization (Qi et al. 2026, arXiv 2602.04879), in its binary form."""

    divergence: Divergence = Divergence.TV
    threshold_low: PositiveNumber | None = None
    """Largest divergence of a token whose probability decreased while its advantage is not positive. A token with a
    larger divergence gets no gradient. 0.15 for TV and 0.05 for KL when unset."""
    threshold_high: PositiveNumber | None = None
    """Largest divergence of a token whose probability increased while its advantage is positive. A token with a larger
    divergence gets no gradient. 0.15 for TV and 0.05 for KL when unset."""
    max_ratio: PositiveNumber = 20.0
    """Upper bound of the ratio."""


class Dro(WireModel):
    """Direct reward optimization (Richemond et al. 2024, arXiv 2405.19107) with given advantages."""

    beta: PositiveNumber
    """Weight of the penalty beta / 2 x log-ratio^2."""


class Loss(Variants):
    """The policy loss of each token; `aggregation` combines the losses of all tokens."""

    type: LossType | None = None
    """Kind of policy loss, for example GSPO. Set by the recipe when unset."""
    clipped: Clipped | None = None
    gspo: Gspo | None = None
    cispo: Cispo | None = None
    sapo: Sapo | None = None
    gmpo: Gmpo | None = None
    clip_cov: ClipCov | None = None
    kl_cov: KlCov | None = None
    dppo: Dppo | None = None
    dro: Dro | None = None
    function: Function | None = None
    """User-defined loss for `type: Function`: takes `rljob_trainer.algorithms.LossInputs`, returns a loss per token.

    With the decorator `policy_loss_function` it can request more inputs: other log-probabilities, the entropy, or
    statistics of the mini-batch."""


POLICY_LOSS_RULES = (
    *required_block_rules(Loss, LossType),
    rule(
        Clipped,
        "Clipped.dualClipRatio",
        field=".dualClipRatio",
        cel="!has(self.dualClipRatio) || self.dualClipRatio == 0.0 || self.dualClipRatio > 1.0",
        wrong="must be above 1, or 0 to disable the dual clip",
        advice="use for example 3.0",
        holds=lambda clipped: not clipped.dual_clip_ratio or clipped.dual_clip_ratio > 1,
    ),
    rule(
        ClipCov,
        "ClipCov.covarianceHigh",
        field=".covarianceHigh",
        cel="self.covarianceHigh > self.covarianceLow",
        wrong="must be above covarianceLow",
        advice="use for example covarianceLow: 1 and covarianceHigh: 5, as in the paper",
        holds=lambda block: block.covariance_high > block.covariance_low,
    ),
)
