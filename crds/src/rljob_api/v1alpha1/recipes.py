"""Recipes, and the resolved form of a learning rule: every field has its value, and only the chosen parts are there.

The trainer works with the resolved form only; `rljob validate --resolved` and the run folder show it as the job file
that says the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rljob_api.v1alpha1.algorithm import (
    Advantage,
    AdvantageType,
    Algorithm,
    AlgorithmType,
    Clipped,
    Function,
    GroupRelative,
    Kl,
    KlEstimator,
    KlPlacement,
    Loss,
    LossAggregation,
    LossType,
    RejectionLevel,
    RolloutCorrection,
    RolloutCorrectionType,
    RolloutRejection,
)

NO_DUAL_CLIP = 0.0
"""What a job says for no bound; unset is the recipe's."""
MASKED_CORRECTIONS = (RolloutCorrectionType.TOKEN_MASKED, RolloutCorrectionType.SEQUENCE_MASKED)
"""Those with a bound below."""
MAX_RATIO = 2.0
"""Of rollout correction: what verl has, and Yao et al. 2025 use."""


@dataclass(frozen=True, slots=True)
class ResolvedGroupRelative:
    """`GroupRelative` with its values."""

    normalize_by_std: bool


@dataclass(frozen=True, slots=True)
class ResolvedClipped:
    """`Clipped` with its values."""

    clip_ratio_low: float
    clip_ratio_high: float
    dual_clip_ratio: float | None
    """None: negative advantages have no bound of their own."""


@dataclass(frozen=True, slots=True)
class ResolvedAdvantage:
    """The chosen advantage; the block that `type` names is there, and no other."""

    type: AdvantageType
    group_relative: ResolvedGroupRelative | None = None
    function: Function | None = None


@dataclass(frozen=True, slots=True)
class ResolvedLoss:
    """The chosen loss; the block that `type` names is there, and no other."""

    type: LossType
    clipped: ResolvedClipped | None = None
    function: Function | None = None


@dataclass(frozen=True, slots=True)
class ResolvedWeights:
    """What policy losses are multiplied by."""

    type: RolloutCorrectionType
    max_ratio: float
    min_ratio: float | None
    """None: no bound below."""

    @property
    def is_of_sequence(self) -> bool:
        """Whether all tokens of a response have the same."""
        return self.type in (RolloutCorrectionType.SEQUENCE_TRUNCATED, RolloutCorrectionType.SEQUENCE_MASKED)


@dataclass(frozen=True, slots=True)
class ResolvedRejection:
    """`RolloutRejection` with its values."""

    level: RejectionLevel
    estimator: KlEstimator
    max: float
    min: float | None
    """None: no bound below."""


@dataclass(frozen=True, slots=True)
class ResolvedRolloutCorrection:
    """`RolloutCorrection` with its values; None for what is not done."""

    weights: ResolvedWeights | None = None
    rejection: ResolvedRejection | None = None

    def as_written(self) -> RolloutCorrection:
        """The job's form."""
        rejection = self.rejection and RolloutRejection(
            level=self.rejection.level,
            estimator=self.rejection.estimator,
            max=self.rejection.max,
            min=self.rejection.min,
        )
        if self.weights is None:
            return RolloutCorrection(rejection=rejection)
        return RolloutCorrection(
            type=self.weights.type,
            max_ratio=self.weights.max_ratio,
            min_ratio=self.weights.min_ratio,
            rejection=rejection,
        )


@dataclass(frozen=True, slots=True)
class ResolvedAlgorithm:
    """A learning rule without open questions."""

    type: AlgorithmType
    advantage: ResolvedAdvantage
    loss: ResolvedLoss
    aggregation: LossAggregation
    drop_zero_variance_groups: bool
    entropy_coefficient: float
    kl: Kl
    rollout_correction: ResolvedRolloutCorrection = ResolvedRolloutCorrection()

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether the KL to the reference is subtracted from rewards."""
        return self.kl.coefficient > 0 and self.kl.placement is KlPlacement.REWARD

    def as_algorithm(self) -> Algorithm:
        """The job's form that says the same with every field written out; it resolves to this again."""
        relative, clipped = self.advantage.group_relative, self.loss.clipped
        return Algorithm(
            type=self.type,
            advantage=Advantage(
                type=self.advantage.type,
                group_relative=GroupRelative(normalize_by_std=relative.normalize_by_std) if relative else None,
                function=self.advantage.function,
            ),
            loss=Loss(
                type=self.loss.type,
                clipped=_clipped_as_written(clipped) if clipped else None,
                function=self.loss.function,
            ),
            aggregation=self.aggregation,
            drop_zero_variance_groups=self.drop_zero_variance_groups,
            entropy_coefficient=self.entropy_coefficient,
            kl=self.kl,
            rollout_correction=self.rollout_correction.as_written(),
        )


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a name stands for. The settings of a part are also those of a job that chooses the part by itself."""

    advantage: AdvantageType
    loss: LossType
    aggregation: LossAggregation
    group_relative: ResolvedGroupRelative = ResolvedGroupRelative(normalize_by_std=True)
    clipped: ResolvedClipped = ResolvedClipped(clip_ratio_low=0.2, clip_ratio_high=0.2, dual_clip_ratio=3.0)
    drop_zero_variance_groups: bool = False


RECIPES: Mapping[AlgorithmType, Recipe] = MappingProxyType(
    {
        AlgorithmType.GRPO: Recipe(
            advantage=AdvantageType.GROUP_RELATIVE, loss=LossType.CLIPPED, aggregation=LossAggregation.TOKEN_MEAN
        ),
        AlgorithmType.DR_GRPO: Recipe(
            advantage=AdvantageType.GROUP_RELATIVE,
            loss=LossType.CLIPPED,
            aggregation=LossAggregation.SEQUENCE_MEAN_TOKEN_SUM_NORM,
            group_relative=ResolvedGroupRelative(normalize_by_std=False),
            clipped=ResolvedClipped(clip_ratio_low=0.2, clip_ratio_high=0.2, dual_clip_ratio=None),
        ),
    }
)


def resolve_algorithm(algorithm: Algorithm) -> ResolvedAlgorithm:
    """The recipe with what the job changes in it."""
    recipe = RECIPES[algorithm.type]
    drops = algorithm.drop_zero_variance_groups
    return ResolvedAlgorithm(
        type=algorithm.type,
        advantage=_resolved_advantage(algorithm, recipe),
        loss=_resolved_loss(algorithm, recipe),
        aggregation=algorithm.aggregation or recipe.aggregation,
        drop_zero_variance_groups=recipe.drop_zero_variance_groups if drops is None else drops,
        entropy_coefficient=algorithm.entropy_coefficient,
        kl=algorithm.kl,
        rollout_correction=_resolved_correction(algorithm.rollout_correction),
    )


def advantage_type(algorithm: Algorithm) -> AdvantageType:
    """The job's choice, else the recipe's."""
    return algorithm.advantage.type or RECIPES[algorithm.type].advantage


def loss_type(algorithm: Algorithm) -> LossType:
    """The job's choice, else the recipe's."""
    return algorithm.loss.type or RECIPES[algorithm.type].loss


def _resolved_advantage(algorithm: Algorithm, recipe: Recipe) -> ResolvedAdvantage:
    chosen = advantage_type(algorithm)
    if chosen is AdvantageType.FUNCTION:
        return ResolvedAdvantage(chosen, function=algorithm.advantage.function)
    block = algorithm.advantage.group_relative
    written = block.normalize_by_std if block else None
    by_std = recipe.group_relative.normalize_by_std if written is None else written
    return ResolvedAdvantage(chosen, group_relative=ResolvedGroupRelative(normalize_by_std=by_std))


def _resolved_loss(algorithm: Algorithm, recipe: Recipe) -> ResolvedLoss:
    chosen = loss_type(algorithm)
    if chosen is LossType.FUNCTION:
        return ResolvedLoss(chosen, function=algorithm.loss.function)
    block, default = algorithm.loss.clipped or Clipped(), recipe.clipped
    dual = default.dual_clip_ratio if block.dual_clip_ratio is None else block.dual_clip_ratio or None
    clipped = ResolvedClipped(
        clip_ratio_low=default.clip_ratio_low if block.clip_ratio_low is None else block.clip_ratio_low,
        clip_ratio_high=default.clip_ratio_high if block.clip_ratio_high is None else block.clip_ratio_high,
        dual_clip_ratio=dual,
    )
    return ResolvedLoss(chosen, clipped=clipped)


def _resolved_correction(correction: RolloutCorrection) -> ResolvedRolloutCorrection:
    weights: ResolvedWeights | None = None
    if correction.type is not RolloutCorrectionType.NONE:
        highest, lowest = correction.max_ratio or MAX_RATIO, correction.min_ratio
        if correction.type in MASKED_CORRECTIONS:
            lowest = lowest or 1.0 / highest
        weights = ResolvedWeights(correction.type, highest, lowest)
    rejection: ResolvedRejection | None = None
    if correction.rejection is not None:
        asked = correction.rejection
        lowest = asked.min
        if asked.estimator is KlEstimator.K1:
            lowest = lowest or 1.0 / asked.max
        rejection = ResolvedRejection(asked.level, asked.estimator, asked.max, lowest)
    return ResolvedRolloutCorrection(weights, rejection)


def _clipped_as_written(clipped: ResolvedClipped) -> Clipped:
    return Clipped(
        clip_ratio_low=clipped.clip_ratio_low,
        clip_ratio_high=clipped.clip_ratio_high,
        dual_clip_ratio=NO_DUAL_CLIP if clipped.dual_clip_ratio is None else clipped.dual_clip_ratio,
    )
