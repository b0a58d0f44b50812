"""The chosen policy loss without open questions."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.v1alpha1.policy_loss import Clipped, Loss, LossType
from rljob_api.v1alpha1.user_function import Function

NO_DUAL_CLIP = 0.0
"""What a job says for no bound; unset is the recipe's."""


@dataclass(frozen=True, slots=True)
class ResolvedClipped:
    """`Clipped` with its values."""

    clip_ratio_low: float
    clip_ratio_high: float
    dual_clip_ratio: float | None
    """None: negative advantages have no bound of their own."""


@dataclass(frozen=True, slots=True)
class ResolvedLoss:
    """The chosen loss; the block that `type` names is there, and no other."""

    type: LossType
    clipped: ResolvedClipped | None = None
    function: Function | None = None

    def as_written(self) -> Loss:
        """The job's form."""
        return Loss(
            type=self.type,
            clipped=_clipped_as_written(self.clipped) if self.clipped else None,
            function=self.function,
        )


def resolve_loss(chosen: LossType, written: Loss, default: ResolvedClipped) -> ResolvedLoss:
    """Loss `chosen` with what the job has written; `default` are the recipe's settings."""
    if chosen is LossType.FUNCTION:
        return ResolvedLoss(chosen, function=written.function)
    block = written.clipped or Clipped()
    dual = default.dual_clip_ratio if block.dual_clip_ratio is None else block.dual_clip_ratio or None
    clipped = ResolvedClipped(
        clip_ratio_low=default.clip_ratio_low if block.clip_ratio_low is None else block.clip_ratio_low,
        clip_ratio_high=default.clip_ratio_high if block.clip_ratio_high is None else block.clip_ratio_high,
        dual_clip_ratio=dual,
    )
    return ResolvedLoss(chosen, clipped=clipped)


def _clipped_as_written(clipped: ResolvedClipped) -> Clipped:
    return Clipped(
        clip_ratio_low=clipped.clip_ratio_low,
        clip_ratio_high=clipped.clip_ratio_high,
        dual_clip_ratio=NO_DUAL_CLIP if clipped.dual_clip_ratio is None else clipped.dual_clip_ratio,
    )
