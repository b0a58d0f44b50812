"""The KL term, a part of the algorithm: a penalty for distance from the reference model."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.rule import Rule, rule, union_rules
from rljob_api.scalars import Flag, NonNegativeNumber, PositiveCount, PositiveNumber


class KlEstimator(StrEnum):
    """Per-token estimator of KL(policy || reference), in nats, from d = logprob - reference logprob (Schulman 2020,
    http://joschu.net/blog/kl-approx.html)."""

    K1 = "K1"
    """d."""
    K2 = "K2"
    """d^2 / 2."""
    K3 = "K3"
    """exp(-d) - 1 + d, limited to 10 for each token; a token above the limit has no gradient."""
    ABSOLUTE = "Absolute"
    """|d|."""


class KlPlacement(StrEnum):
    """Where the KL term is applied."""

    LOSS = "Loss"
    """The KL term is added to the loss."""
    REWARD = "Reward"
    """The KL term is subtracted from the rewards."""


class KlControllerType(StrEnum):
    """How kl.coefficient changes from step to step."""

    FIXED = "Fixed"
    """The coefficient stays the same."""
    ADAPTIVE = "Adaptive"
    """The coefficient is adapted to keep the KL close to a target."""


class AdaptiveKl(WireModel):
    """Adaptive coefficient (Ziegler et al. 2019, arXiv 1909.08593, section 2.2): after each step, the coefficient is
    multiplied by 1 + error x responses / horizon, where error is KL / target - 1, clipped to [-0.2, 0.2]."""

    target: PositiveNumber
    """Target of the metric `actor/kl_loss`, in nats per response token by the job's estimator, for example 0.01."""
    horizon: PositiveCount = 10000
    """Number of responses after which the coefficient has changed by about a fifth, if the KL is at least a fifth away
    from the target."""


class KlController(WireModel):
    """How kl.coefficient changes from step to step. The metric `actor/kl_coefficient` shows the current coefficient,
    which is part of checkpoints."""

    type: KlControllerType = KlControllerType.FIXED
    adaptive: AdaptiveKl | None = None


class Kl(WireModel):
    """A penalty for distance from the reference model. With coefficient 0 there is no reference model, unless a
    user-defined function needs the reference's log-probabilities."""

    coefficient: NonNegativeNumber = 0.0
    """Weight of the KL term in the first step, for example 0.001. A Fixed controller keeps it in all steps."""
    estimator: KlEstimator = KlEstimator.K3
    placement: KlPlacement = KlPlacement.LOSS
    straight_through: Flag = False
    """Use the gradient of K2, whose expectation is the gradient of the true KL, with the value of the chosen estimator
    (verl: `k1+`, `k3+`). Only for placement Loss."""
    controller: KlController = Field(default_factory=KlController)

    @property
    def is_in_reward(self) -> bool:
        """Whether the KL to the reference is subtracted from rewards."""
        return self.coefficient > 0 and self.placement is KlPlacement.REWARD


def _kl_rule(field: str, is_default_cel: str, is_default: Callable[[Kl], bool]) -> Rule:
    """The rule that a field has its default if the coefficient is 0, because the field would be ignored. The API server
    fills in defaults, so the rule cannot see whether the job sets the default. `is_default_cel` is the CEL form of
    `is_default`."""
    return rule(
        Kl,
        f"Kl.{field}",
        field=f".{field}",
        cel=f"!has(self.coefficient) || self.coefficient > 0.0 || {is_default_cel}",
        wrong="would be ignored with kl.coefficient 0",
        advice="remove it, or set kl.coefficient above 0",
        holds=lambda kl: kl.coefficient > 0 or is_default(kl),
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
        wrong="must not be true with placement Reward, because rewards have no gradient",
        advice="remove it, or set placement: Loss",
        holds=lambda kl: not kl.straight_through or kl.placement is not KlPlacement.REWARD,
    ),
    rule(
        Kl,
        "Kl.straightThroughOfK2",
        field=".straightThrough",
        cel="!has(self.coefficient) || !self.straightThrough || self.estimator != 'K2'",
        wrong="must not be true with estimator K2, because it would change nothing",
        advice="remove it, or choose another estimator",
        holds=lambda kl: not kl.straight_through or kl.estimator is not KlEstimator.K2,
    ),
)
