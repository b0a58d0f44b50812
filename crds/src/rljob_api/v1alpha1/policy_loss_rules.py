"""Rules on the policy loss that a job chooses."""

from __future__ import annotations

from collections.abc import Callable

from rljob_api.rule import Rule, rule, union_rules
from rljob_api.v1alpha1.chosen_part import block_rule
from rljob_api.v1alpha1.policy_loss import ClipCov, Clipped, Loss, LossType
from rljob_api.v1alpha1.recipes import loss_type

_BLOCKS: tuple[tuple[LossType, str, Callable[[Loss], object]], ...] = (
    (LossType.CLIPPED, "clipped", lambda loss: loss.clipped),
    (LossType.GSPO, "gspo", lambda loss: loss.gspo),
    (LossType.CISPO, "cispo", lambda loss: loss.cispo),
    (LossType.SAPO, "sapo", lambda loss: loss.sapo),
    (LossType.GMPO, "gmpo", lambda loss: loss.gmpo),
    (LossType.CLIP_COV, "clipCov", lambda loss: loss.clip_cov),
    (LossType.KL_COV, "klCov", lambda loss: loss.kl_cov),
    (LossType.DPPO, "dppo", lambda loss: loss.dppo),
)
"""Those that may be left out."""


def _belongs_rule(variant: LossType, block: str, read: Callable[[Loss], object]) -> Rule:
    return block_rule(
        f".loss.{block}",
        variant,
        lambda a: read(a.loss) is None or loss_type(a) is variant,
    )


POLICY_LOSS_RULES = (
    *union_rules(
        Loss,
        (
            ("Function", "function", lambda loss: (loss.type, loss.function)),
            ("DRO", "dro", lambda loss: (loss.type, loss.dro)),
        ),
    ),
    *(_belongs_rule(*block) for block in _BLOCKS),
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
