"""Rules on the policy loss that a job chooses."""

from __future__ import annotations

from rljob_api.v1alpha1.chosen_part import block_rule, chosen_cel
from rljob_api.v1alpha1.policy_loss import Clipped, Loss, LossType
from rljob_api.v1alpha1.recipes import loss_type
from rljob_api.v1alpha1.rule import rule, union_rules

POLICY_LOSS_RULES = (
    *union_rules(Loss, (("Function", "function", lambda loss: (loss.type, loss.function)),)),
    block_rule(
        ".loss.clipped",
        chosen_cel("self", "loss"),
        LossType.CLIPPED,
        lambda a: a.loss.clipped is None or loss_type(a) is LossType.CLIPPED,
    ),
    rule(
        Clipped,
        "Clipped.dualClipRatio",
        field=".dualClipRatio",
        cel="!has(self.dualClipRatio) || self.dualClipRatio == 0.0 || self.dualClipRatio > 1.0",
        wrong="must be above 1, or 0 for none",
        advice="3.0 is usual; 0 turns dual clipping off",
        holds=lambda clipped: not clipped.dual_clip_ratio or clipped.dual_clip_ratio > 1,
    ),
)
