"""The policy loss of one token: one part of a learning rule (`algorithm`). What a block leaves out is the recipe's."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.scalars import NonNegativeNumber, PositiveNumber
from rljob_api.v1alpha1.user_function import Function


class LossType(StrEnum):
    """The policy loss of one token."""

    CLIPPED = "Clipped"
    FUNCTION = "Function"


class Clipped(WireModel):
    """The clipped ratio of PPO (Schulman et al. 2017, arXiv 1707.06347). What is unset is the recipe's."""

    clip_ratio_low: PositiveNumber | None = None
    """The probability ratio is clipped below at 1 - clipRatioLow."""
    clip_ratio_high: PositiveNumber | None = None
    """... and above at 1 + clipRatioHigh."""
    dual_clip_ratio: NonNegativeNumber | None = None
    """Bound on the loss of negative advantages (arXiv 1912.09729); above 1, or 0 for none."""


class Loss(WireModel):
    """The policy loss of one token; `aggregation` makes one number of all."""

    type: LossType | None = None
    """The recipe's when unset."""
    clipped: Clipped | None = None
    function: Function | None = None
    """For `type: Function`: takes `rljob_trainer.algorithms.LossInputs`, returns a loss for each token. Decorated with
    `policy_loss_function` it may ask for more: other log-probabilities, the entropy, a look at the mini-batch."""
