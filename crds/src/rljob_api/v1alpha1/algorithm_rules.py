"""Rules on the learning rule: blocks belong to the parts that are chosen, and no setting is ignored.

The API server also tries a rule on the default of its object, which is `{}` with nothing filled in, when it takes the
CRD: so the CEL of `Algorithm` and `Kl` asks for fields that are always there in a job.
"""

from __future__ import annotations

from collections.abc import Callable

from rljob_api.v1alpha1.algorithm import (
    Advantage,
    AdvantageType,
    Algorithm,
    Clipped,
    Kl,
    KlEstimator,
    KlPlacement,
    Loss,
    LossType,
)
from rljob_api.v1alpha1.recipes import RECIPES, advantage_type, loss_type
from rljob_api.v1alpha1.rule import Rule, rule, union_rules
from rljob_api.v1alpha1.training import Training

_CHOSEN_BY_RECIPE = {
    "advantage": {str(name): str(recipe.advantage) for name, recipe in RECIPES.items()},
    "loss": {str(name): str(recipe.loss) for name, recipe in RECIPES.items()},
}


def _chosen_cel(algorithm: str, part: str) -> str:
    """`recipes.advantage_type` and `recipes.loss_type` in CEL: the job's choice, else the recipe's."""
    return f"(has({algorithm}.{part}.type) ? {algorithm}.{part}.type : {_CHOSEN_BY_RECIPE[part]}[{algorithm}.type])"


def _block_rule(field: str, chosen_cel: str, variant: str, holds: Callable[[Algorithm], bool]) -> Rule:
    """A block of settings may be left out, and belongs to one type of its part. `field` is `.<part>.<block>`."""
    part, block = field[1:].split(".")
    return rule(
        Algorithm,
        f"Algorithm{field}",
        field=field,
        cel=f"!has(self.{part}) || !has(self{field}) || {chosen_cel} == '{variant}'",
        wrong=f"the block `{block}` is ignored: the {part} that the job chooses is not {variant}",
        advice=f"remove the block, or write `type: {variant}` beside it",
        holds=holds,
    )


def _kl_rule(field: str, default: str, holds: Callable[[Kl], bool]) -> Rule:
    """The API server fills in defaults, so that of what is ignored only another value than the default can be told."""
    return rule(
        Kl,
        f"Kl.{field}",
        field=f".{field}",
        cel=f"!has(self.coefficient) || self.coefficient > 0.0 || self.{field} == '{default}'",
        wrong="is ignored with kl.coefficient 0",
        advice="remove it, or set a coefficient above 0",
        holds=lambda kl: kl.coefficient > 0 or holds(kl),
    )


def _responses_are_compared(training: Training) -> bool:
    compared = advantage_type(training.algorithm) is AdvantageType.GROUP_RELATIVE
    return not compared or training.rollout.group_size >= 2


FUNCTION_RULES = (
    *union_rules(Advantage, (("Function", "function", lambda advantage: (advantage.type, advantage.function)),)),
    *union_rules(Loss, (("Function", "function", lambda loss: (loss.type, loss.function)),)),
)

ALGORITHM_RULES = (
    _block_rule(
        ".advantage.groupRelative",
        _chosen_cel("self", "advantage"),
        AdvantageType.GROUP_RELATIVE,
        lambda a: a.advantage.group_relative is None or advantage_type(a) is AdvantageType.GROUP_RELATIVE,
    ),
    _block_rule(
        ".loss.clipped",
        _chosen_cel("self", "loss"),
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
    _kl_rule("estimator", KlEstimator.K3, lambda kl: kl.estimator is KlEstimator.K3),
    _kl_rule("placement", KlPlacement.LOSS, lambda kl: kl.placement is KlPlacement.LOSS),
    rule(
        Training,
        "Training.groupSize",
        field=".rollout.groupSize",
        cel=f"{_chosen_cel('self.algorithm', 'advantage')} != 'GroupRelative' || self.rollout.groupSize >= 2",
        wrong="GroupRelative advantages compare responses to the same prompt and need at least 2 of them",
        advice="set groupSize to 2 or more (8 is usual)",
        holds=_responses_are_compared,
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
