"""The penalty for moving away from the reference policy: one part of a learning rule (`algorithm`)."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import Flag, NonNegativeNumber, PositiveCount, PositiveNumber


class KlEstimator(StrEnum):
    """Per-token estimators of KL(policy || reference) (Schulman 2020, http://joschu.net/blog/kl-approx.html), of the
    difference d of the two log-probabilities: K1 is d, K2 d^2 / 2, K3 exp(-d) - 1 + d, Absolute |d|.
    K3 is held below 10 nats for each token, with no gradient beyond."""

    K1 = "K1"
    K2 = "K2"
    K3 = "K3"
    ABSOLUTE = "Absolute"


class KlPlacement(StrEnum):
    """Where the KL term enters."""

    LOSS = "Loss"
    REWARD = "Reward"


class KlControllerType(StrEnum):
    """What becomes of the coefficient from step to step."""

    FIXED = "Fixed"
    ADAPTIVE = "Adaptive"


class AdaptiveKl(WireModel):
    """After each step the coefficient is multiplied by 1 + error * responses / horizon. The error is the step's KL by
    the target, less 1, held within 0.2 on both sides (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)."""

    target: PositiveNumber
    """Nats per response token, by the job's estimator: what `actor/kl_loss` is to be."""
    horizon: PositiveCount = 10000
    """Responses. After so many that are learned from, with the KL a fifth or more from the target all the time, the
    coefficient has changed by about a fifth."""


class KlController(WireModel):
    """What becomes of the coefficient from step to step: nothing with Fixed; Adaptive holds the KL near a target. The
    coefficient in use is `actor/kl_coefficient`, and part of checkpoints."""

    type: KlControllerType = KlControllerType.FIXED
    adaptive: AdaptiveKl | None = None


class Kl(WireModel):
    """Penalty for moving away from the reference policy. With coefficient 0 no reference is computed, unless a function
    of one's own needs its log-probabilities."""

    coefficient: NonNegativeNumber = 0.0
    """Of the first step; with a Fixed controller of all steps."""
    estimator: KlEstimator = KlEstimator.K3
    placement: KlPlacement = KlPlacement.LOSS
    straight_through: Flag = False
    """In the loss: the estimator's value with K2's gradient, which is that of the true KL in expectation (verl: `k1+`,
    `k3+`)."""
    controller: KlController = Field(default_factory=KlController)
