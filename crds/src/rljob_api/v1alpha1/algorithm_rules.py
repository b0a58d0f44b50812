"""Rules on the learning rule: blocks belong to the parts that are chosen, and no setting is ignored.

The API server also tries a rule on the default of its object, which is `{}` with nothing filled in, when it takes the
CRD: so the CEL of `Algorithm` and `Kl` asks for fields that are always there in a job.
"""

from __future__ import annotations

from collections.abc import Callable

from rljob_api.rule import Rule, rule, union_rules
from rljob_api.v1alpha1.kl import Kl, KlController, KlControllerType, KlEstimator, KlPlacement
from rljob_api.v1alpha1.training import Training


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


def _coefficient_stays_above_zero(training: Training) -> bool:
    adaptive = training.algorithm.kl.controller.adaptive
    return adaptive is None or training.batch_size * training.rollout.group_size < 5 * adaptive.horizon


ALGORITHM_RULES = (
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
    rule(
        Training,
        "Training.klHorizon",
        field=".algorithm.kl.controller.adaptive.horizon",
        cel="!has(self.algorithm.kl.controller.adaptive)"
        " || self.batchSize * self.rollout.groupSize < 5 * self.algorithm.kl.controller.adaptive.horizon",
        wrong="must be more than a fifth of the responses of a step (batchSize * rollout.groupSize), or one step could "
        "take the coefficient to 0",
        advice="write several times as many as a step has",
        holds=_coefficient_stays_above_zero,
    ),
    rule(
        Training,
        "Training.dropZeroVarianceGroups",
        field=".algorithm.dropZeroVarianceGroups",
        cel="!has(self.algorithm.dropZeroVarianceGroups) || !self.algorithm.dropZeroVarianceGroups"
        " || self.rollout.groupSize >= 2",
        wrong="with rollout.groupSize 1 all rewards of a group are equal, and nothing would be left",
        advice="set it to false, or groupSize to 2 or more",
        holds=lambda t: not t.algorithm.drop_zero_variance_groups or t.rollout.group_size >= 2,
    ),
)
