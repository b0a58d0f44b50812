"""The policy loss of one token: one part of a learning rule (`algorithm`). What a block leaves out is its own default;
only of `Clipped` it is the recipe's."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.rule import required_block_rules, rule
from rljob_api.scalars import NonNegativeNumber, Number, OpenFraction, PositiveNumber, Temperature
from rljob_api.v1alpha1.user_function import Function
from rljob_api.variants import Variants


class LossType(StrEnum):
    """The policy loss of one token, of its ratio r = exp(log-probability less that before the step's updates) and its
    advantage A."""

    CLIPPED = "Clipped"
    """PPO's: max(-A r, -A clip(r)), with dual clip."""
    GSPO = "GSPO"
    """PPO's with the ratio of the whole response, the geometric mean of its tokens'. The paper's aggregation is
    SequenceMeanTokenMean."""
    CISPO = "CISPO"
    """-clip(r) A log-probability: the bounded ratio is a weight, and no token loses its gradient."""
    SAPO = "SAPO"
    """A soft gate in the place of the clip. The paper's aggregation is SequenceMeanTokenMean."""
    GPG = "GPG"
    """-A log-probability: the plain policy gradient."""
    GMPO = "GMPO"
    """The geometric mean of a response's clipped ratios. The paper's aggregation is SequenceMeanTokenMean."""
    CLIP_COV = "ClipCov"
    """Clipped, and some tokens with a high covariance of log-probability and advantage give no gradient."""
    KL_COV = "KLCov"
    """-A r, and a penalty on the tokens with the highest covariance of log-probability and advantage."""
    DPPO = "DPPO"
    """-A r, without the tokens whose probability has moved too far in the direction that A pushes."""
    DRO = "DRO"
    """-A log-probability, and the squared log-ratio as a penalty."""
    FUNCTION = "Function"


WITH_WHOLE_PASS = (LossType.CLIP_COV, LossType.KL_COV)
"""What looks at the whole mini-batch before each update: one more forward pass."""
NO_DUAL_CLIP = 0.0
"""What a job says for no bound; unset is the recipe's."""


class Clipped(WireModel):
    """The clipped ratio of PPO (Schulman et al. 2017, arXiv 1707.06347). What is unset is the recipe's."""

    clip_ratio_low: PositiveNumber | None = None
    """The probability ratio is clipped below at 1 - clipRatioLow."""
    clip_ratio_high: PositiveNumber | None = None
    """... and above at 1 + clipRatioHigh."""
    dual_clip_ratio: NonNegativeNumber | None = None
    """Bound on the loss of negative advantages (arXiv 1912.09729); above 1, or 0 for none."""


class Gspo(WireModel):
    """Group sequence policy optimization (Zheng et al. 2025, arXiv 2507.18071)."""

    clip_ratio_low: PositiveNumber = 3e-4
    """The response's ratio is clipped below at 1 - clipRatioLow."""
    clip_ratio_high: PositiveNumber = 4e-4
    """... and above at 1 + clipRatioHigh. A mean over tokens moves far less than one token's ratio: bounds of 0.2 never
    bind."""


class Cispo(WireModel):
    """Clipped importance weights (MiniMax 2025, arXiv 2506.13585)."""

    clip_ratio_low: PositiveNumber = 1.0
    """The weight is at least 1 - clipRatioLow; from 1 on there is no bound below, as in the paper."""
    clip_ratio_high: PositiveNumber = 4.0
    """The weight is at most 1 + clipRatioHigh. The paper tunes it and gives no value; 5 as the bound is that of ScaleRL
    (arXiv 2510.13786)."""


class Sapo(WireModel):
    """Soft adaptive policy optimization (Gao et al. 2025, arXiv 2511.20347)."""

    temperature_positive: Temperature = 1.0
    """Of the gate of positive advantages; higher closes it sooner."""
    temperature_negative: Temperature = 1.05
    """Of the gate of the others."""


class Gmpo(WireModel):
    """Geometric-mean policy optimization (Zhao et al. 2025, arXiv 2507.20673)."""

    clip_log_ratio_low: PositiveNumber = 0.4
    """A token's log-ratio is clipped below at -clipLogRatioLow where its advantage is negative, ..."""
    clip_log_ratio_high: PositiveNumber = 0.4
    """... and above at clipLogRatioHigh where it is positive."""


class ClipCov(WireModel):
    """Clip-Cov (Cui et al. 2025, arXiv 2505.22617). One more forward pass for each update."""

    clip_ratio_low: PositiveNumber = 0.2
    """As of Clipped."""
    clip_ratio_high: PositiveNumber = 0.2
    token_share: OpenFraction = 2e-4
    """Of the mini-batch's tokens so many, and at least one, are drawn from those in the range, and give no gradient."""
    covariance_low: Number = 1.0
    """The range of (log-probability - its mean) x (advantage - its mean), means over the mini-batch: above this, ..."""
    covariance_high: Number = 5.0
    """... and below this."""


class KlCov(WireModel):
    """KL-Cov (Cui et al. 2025, arXiv 2505.22617). One more forward pass for each update."""

    token_share: OpenFraction = 2e-4
    """Of the mini-batch's tokens so many, and at least one, with the highest covariance are penalised."""
    coefficient: PositiveNumber = 1.0
    """Of the penalty |log-ratio|: the paper's (verl's settings have 0.1)."""


class Divergence(StrEnum):
    """Between a token's old and new probability, each against all other tokens together."""

    TV = "TV"
    """Total variation: the difference of the two probabilities."""
    KL = "KL"
    """KL(old || new), in nats."""


DPPO_THRESHOLDS = {Divergence.TV: 0.15, Divergence.KL: 0.05}
"""Those that the authors train with."""


class Dppo(WireModel):
    """Divergence proximal policy optimization (Qi et al. 2026, arXiv 2602.04879), in its binary form."""

    divergence: Divergence = Divergence.TV
    threshold_low: PositiveNumber | None = None
    """Tokens whose probability has fallen by more, where A is not positive, give no gradient. 0.15 with TV and 0.05
    with KL when unset."""
    threshold_high: PositiveNumber | None = None
    """The same of those whose probability has risen, where A is positive."""
    max_ratio: PositiveNumber = 20.0
    """Bound on the ratio."""


class Dro(WireModel):
    """Direct reward optimization (Richemond et al. 2024, arXiv 2405.19107) with given advantages."""

    beta: PositiveNumber
    """Of the penalty beta / 2 x log-ratio^2."""


class Loss(Variants):
    """The policy loss of one token; `aggregation` makes one number of all."""

    type: LossType | None = None
    """The recipe's when unset."""
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
    """For `type: Function`: takes `rljob_trainer.algorithms.LossInputs`, returns a loss for each token. Decorated with
    `policy_loss_function` it may ask for more: other log-probabilities, the entropy, a look at the mini-batch."""


POLICY_LOSS_RULES = (
    *required_block_rules(Loss, LossType),
    rule(
        Clipped,
        "Clipped.dualClipRatio",
        field=".dualClipRatio",
        cel="!has(self.dualClipRatio) || self.dualClipRatio == 0.0 || self.dualClipRatio > 1.0",
        wrong="must be above 1, or 0 for none",
        advice="3.0 is usual; 0 turns dual clipping off",
        holds=lambda clipped: not clipped.dual_clip_ratio or clipped.dual_clip_ratio > 1,
    ),
    rule(
        ClipCov,
        "ClipCov.covarianceHigh",
        field=".covarianceHigh",
        cel="self.covarianceHigh > self.covarianceLow",
        wrong="must be above covarianceLow, or no token is in the range",
        advice="the paper has 1 and 5",
        holds=lambda block: block.covariance_high > block.covariance_low,
    ),
)
