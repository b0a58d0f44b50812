"""The penalty for moving away from the reference policy: one part of a learning rule (`algorithm`)."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.rule import Rule, rule, union_rules
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

    @property
    def is_in_reward(self) -> bool:
        """Whether the KL to the reference is subtracted from rewards."""
        return self.coefficient > 0 and self.placement is KlPlacement.REWARD


def _kl_rule(field: str, is_default: str, holds: Callable[[Kl], bool]) -> Rule:
    """The API server fills in defaults, so that of what is ignored only another value than the default can be told.
    `is_default` is CEL."""
    return rule(
        Kl,
        f"Kl.{field}",
        field=f".{field}",
        cel=f"!has(self.coefficient) || self.coefficient > 0.0 || {is_default}",
        wrong="is ignored with kl.coefficient 0",
        advice="remove it, or set a coefficient above 0",
        holds=lambda kl: kl.coefficient > 0 or holds(kl),
    )


KL_RULES = (
    *union_rules(KlController, (("Adaptive", "adaptive", lambda controller: (controller.type, controller.adaptive)),)),
    _kl_rule("estimator", f"self.estimator == '{KlEstimator.K3}'", lambda kl: kl.estimator is KlEstimator.K3),
    _kl_rule("placement", f"self.placement == '{KlPlacement.LOSS}'", lambda kl: kl.placement is KlPlacement.LOSS),
    _kl_rule("straightThrough", "!self.straightThrough", lambda kl: not kl.straight_through),
    _kl_rule(
        "controller",
        f"self.controller.type == '{KlControllerType.FIXED}'",
        lambda kl: kl.controller.type is KlControllerType.FIXED,
    ),
    rule(
        Kl,
        "Kl.straightThroughInReward",
        field=".straightThrough",
        cel="!has(self.coefficient) || !self.straightThrough || self.placement != 'Reward'",
        wrong="is ignored with placement Reward, through which no gradient flows",
        advice="remove it, or write placement: Loss",
        holds=lambda kl: not kl.straight_through or kl.placement is not KlPlacement.REWARD,
    ),
    rule(
        Kl,
        "Kl.straightThroughOfK2",
        field=".straightThrough",
        cel="!has(self.coefficient) || !self.straightThrough || self.estimator != 'K2'",
        wrong="changes nothing in K2, whose gradient it stands for",
        advice="remove it, or choose another estimator",
        holds=lambda kl: not kl.straight_through or kl.estimator is not KlEstimator.K2,
    ),
)
