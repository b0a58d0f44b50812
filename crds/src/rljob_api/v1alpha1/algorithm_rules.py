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
    RejectionLevel,
    RolloutCorrection,
    RolloutCorrectionType,
    RolloutRejection,
)
from rljob_api.v1alpha1.recipes import MASKED_CORRECTIONS, MAX_RATIO, RECIPES, advantage_type, loss_type
from rljob_api.v1alpha1.rule import Rule, rule, union_rules
from rljob_api.v1alpha1.spec import RLJobSpec
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


def _samples_all_or_corrects_nothing(training: Training) -> bool:
    correction, rollout = training.algorithm.rollout_correction, training.rollout
    is_none = correction.type is RolloutCorrectionType.NONE and correction.rejection is None
    return is_none or (rollout.top_p == 1 and rollout.top_k == 0)


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

CORRECTION_RULES = (
    rule(
        RolloutCorrection,
        "RolloutCorrection.maxRatio",
        field=".maxRatio",
        cel="!has(self.maxRatio) || !has(self.type) || self.type != 'None'",
        wrong="is ignored with type None",
        advice="remove it, or write `type: TokenTruncated` beside it",
        holds=lambda c: c.max_ratio is None or c.type is not RolloutCorrectionType.NONE,
    ),
    rule(
        RolloutCorrection,
        "RolloutCorrection.minRatio",
        field=".minRatio",
        cel="!has(self.minRatio) || !has(self.type) || self.type in ['TokenMasked', 'SequenceMasked']",
        wrong="only TokenMasked and SequenceMasked have a bound below",
        advice="remove it, or choose one of them",
        holds=lambda c: c.min_ratio is None or c.type in MASKED_CORRECTIONS,
    ),
    rule(
        RolloutCorrection,
        "RolloutCorrection.ratios",
        field=".minRatio",
        cel=f"!has(self.minRatio) || self.minRatio < (has(self.maxRatio) ? self.maxRatio : {MAX_RATIO})",
        wrong=f"must be below maxRatio ({MAX_RATIO} when unset)",
        advice="0.5 and 2.0 are usual",
        holds=lambda c: c.min_ratio is None or c.min_ratio < (c.max_ratio or MAX_RATIO),
    ),
    rule(
        RolloutCorrection,
        "RolloutCorrection.maskedRatio",
        field=".maxRatio",
        cel="!has(self.maxRatio) || has(self.minRatio) || self.maxRatio > 1.0"
        " || !has(self.type) || !(self.type in ['TokenMasked', 'SequenceMasked'])",
        wrong="must be above 1 where minRatio, which is then 1 / maxRatio, is not given",
        advice="raise it, or give minRatio",
        holds=lambda c: (
            c.max_ratio is None or c.min_ratio is not None or c.max_ratio > 1 or c.type not in MASKED_CORRECTIONS
        ),
    ),
    rule(
        RolloutRejection,
        "RolloutRejection.estimator",
        field=".estimator",
        cel="self.level != 'SequenceMax' || self.estimator != 'K1'",
        wrong="K1 has a sign, and its largest value says nothing of the smallest",
        advice="write K2 or K3, or another level",
        holds=lambda r: r.level is not RejectionLevel.SEQUENCE_MAX or r.estimator is not KlEstimator.K1,
    ),
    rule(
        RolloutRejection,
        "RolloutRejection.min",
        field=".min",
        cel="!has(self.min) || self.estimator == 'K1'",
        wrong="K2 is never below 0, nor is K3, and they have no bound below",
        advice="remove it, or write `estimator: K1`",
        holds=lambda r: r.min is None or r.estimator is KlEstimator.K1,
    ),
    rule(
        RolloutRejection,
        "RolloutRejection.bounds",
        field=".max",
        cel="self.estimator != 'K1' || (has(self.min) ? self.min < self.max : self.max > 1.0)",
        wrong="must be above min, which is 1 / max when unset",
        advice="bounds of the ratio on both sides of 1 are usual: 0.5 and 2.0",
        holds=lambda r: r.estimator is not KlEstimator.K1 or (r.min < r.max if r.min is not None else r.max > 1),
    ),
    rule(
        Training,
        "Training.syncEverySteps",
        field=".evaluation.everySteps",
        cel="!has(self.evaluation) || self.evaluation.everySteps % self.rollout.syncEverySteps == 0",
        wrong="must be a multiple of rollout.syncEverySteps: an evaluation takes the newest weights, and would change "
        "what the steps after it learn from",
        advice="change one of the two",
        holds=lambda t: t.evaluation is None or t.evaluation.every_steps % t.rollout.sync_every_steps == 0,
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.syncEverySteps",
        field=".checkpoint.everySteps",
        cel="self.checkpoint.everySteps % self.training.rollout.syncEverySteps == 0",
        wrong="must be a multiple of training.rollout.syncEverySteps: a run that goes on from a checkpoint takes the "
        "newest weights, and would differ from one that was not interrupted",
        advice="change one of the two",
        holds=lambda spec: spec.checkpoint.every_steps % spec.training.rollout.sync_every_steps == 0,
    ),
    rule(
        Training,
        "Training.rolloutCorrection",
        field=".algorithm.rolloutCorrection",
        cel="(self.rollout.topP == 1.0 && self.rollout.topK == 0) || ((!has(self.algorithm.rolloutCorrection.type)"
        " || self.algorithm.rolloutCorrection.type == 'None') && !has(self.algorithm.rolloutCorrection.rejection))",
        wrong="with rollout.topP below 1 or topK the generator's log-probabilities are of what the cut left, and "
        "cannot be compared with the trainer's",
        advice="write topP: 1 and topK: 0, or remove the correction",
        holds=_samples_all_or_corrects_nothing,
    ),
)
