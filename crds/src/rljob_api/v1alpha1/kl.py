"""The penalty for moving away from the reference policy: one part of a learning rule (`algorithm`)."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.scalars import Flag, NonNegativeNumber


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


class Kl(WireModel):
    """Penalty for moving away from the reference policy. With coefficient 0 no reference is computed, unless a function
    of one's own needs its log-probabilities."""

    coefficient: NonNegativeNumber = 0.0
    estimator: KlEstimator = KlEstimator.K3
    placement: KlPlacement = KlPlacement.LOSS
    straight_through: Flag = False
    """In the loss: the estimator's value with K2's gradient, which is that of the true KL in expectation (verl: `k1+`,
    `k3+`)."""
