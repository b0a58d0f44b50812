"""Recipes, and the resolved form of a learning rule: every field has its value, and only the chosen parts are there.

The trainer works with the resolved form only; `rljob validate --resolved` and the run folder show it as the job file
that says the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_api.v1alpha1.algorithm import Algorithm, AlgorithmType, LossAggregation
from rljob_api.v1alpha1.dynamic_sampling import DynamicSampling
from rljob_api.v1alpha1.kl import Kl, KlPlacement
from rljob_api.v1alpha1.policy_filtration import FiltrationScope, PolicyFiltration, PolicyFiltrationType
from rljob_api.v1alpha1.policy_loss import LossType
from rljob_api.v1alpha1.resolved_advantage import ResolvedAdvantage, ResolvedGroupRelative, resolve_advantage
from rljob_api.v1alpha1.resolved_correction import ResolvedRolloutCorrection, resolve_correction
from rljob_api.v1alpha1.resolved_dynamic_sampling import ResolvedDynamicSampling, resolve_dynamic_sampling
from rljob_api.v1alpha1.resolved_loss import ResolvedClipped, ResolvedLoss, resolve_loss

FILTRATION_EXPONENT = 2.0
"""With Power (verl: `weight_pow`)."""
NO_FILTRATION = PolicyFiltration()
NO_CORRECTION = ResolvedRolloutCorrection()
BY_STD = ResolvedGroupRelative(normalize_by_std=True)
DUAL_CLIPPED = ResolvedClipped(clip_ratio_low=0.2, clip_ratio_high=0.2, dual_clip_ratio=3.0)


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
    mask_truncated_responses: bool = False
    rollout_correction: ResolvedRolloutCorrection = NO_CORRECTION
    policy_filtration: PolicyFiltration = NO_FILTRATION
    dynamic_sampling: ResolvedDynamicSampling | None = None

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether the KL to the reference is subtracted from rewards."""
        return self.kl.coefficient > 0 and self.kl.placement is KlPlacement.REWARD

    def as_algorithm(self) -> Algorithm:
        """The job's form that says the same with every field written out; it resolves to this again."""
        return Algorithm(
            type=self.type,
            advantage=self.advantage.as_written(),
            loss=self.loss.as_written(),
            aggregation=self.aggregation,
            drop_zero_variance_groups=self.drop_zero_variance_groups,
            dynamic_sampling=(
                DynamicSampling(enabled=False) if self.dynamic_sampling is None else self.dynamic_sampling.as_written()
            ),
            entropy_coefficient=self.entropy_coefficient,
            kl=self.kl,
            mask_truncated_responses=self.mask_truncated_responses,
            rollout_correction=self.rollout_correction.as_written(),
            policy_filtration=self.policy_filtration,
        )


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a name stands for. The settings of a part are also those of a job that chooses the part by itself."""

    advantage: AdvantageType
    loss: LossType
    aggregation: LossAggregation
    group_relative: ResolvedGroupRelative = BY_STD
    clipped: ResolvedClipped = DUAL_CLIPPED
    has_dynamic_sampling: bool = False


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
        AlgorithmType.DAPO: Recipe(
            advantage=AdvantageType.GROUP_RELATIVE,
            loss=LossType.CLIPPED,
            aggregation=LossAggregation.TOKEN_MEAN,
            clipped=ResolvedClipped(clip_ratio_low=0.2, clip_ratio_high=0.28, dual_clip_ratio=None),
            has_dynamic_sampling=True,
        ),
        AlgorithmType.RLOO: Recipe(
            advantage=AdvantageType.LEAVE_ONE_OUT, loss=LossType.CLIPPED, aggregation=LossAggregation.TOKEN_MEAN
        ),
        AlgorithmType.REINFORCE_PLUS_PLUS: Recipe(
            advantage=AdvantageType.REINFORCE_PLUS_PLUS, loss=LossType.CLIPPED, aggregation=LossAggregation.TOKEN_MEAN
        ),
        AlgorithmType.REMAX: Recipe(
            advantage=AdvantageType.REMAX, loss=LossType.CLIPPED, aggregation=LossAggregation.TOKEN_MEAN
        ),
        AlgorithmType.PPO: Recipe(
            advantage=AdvantageType.GAE,
            loss=LossType.CLIPPED,
            aggregation=LossAggregation.TOKEN_MEAN,
            clipped=ResolvedClipped(clip_ratio_low=0.2, clip_ratio_high=0.2, dual_clip_ratio=None),
        ),
        AlgorithmType.GSPO: Recipe(
            advantage=AdvantageType.GROUP_RELATIVE,
            loss=LossType.GSPO,
            aggregation=LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN,
        ),
        AlgorithmType.CISPO: Recipe(
            advantage=AdvantageType.GROUP_RELATIVE, loss=LossType.CISPO, aggregation=LossAggregation.TOKEN_MEAN
        ),
    }
)


def resolve_algorithm(algorithm: Algorithm) -> ResolvedAlgorithm:
    """The recipe with what the job changes in it."""
    recipe = RECIPES[algorithm.type]
    sampling = algorithm.dynamic_sampling or DynamicSampling(enabled=recipe.has_dynamic_sampling)
    return ResolvedAlgorithm(
        type=algorithm.type,
        advantage=resolve_advantage(advantage_type(algorithm), algorithm.advantage, recipe.group_relative),
        loss=resolve_loss(loss_type(algorithm), algorithm.loss, recipe.clipped),
        aggregation=algorithm.aggregation or recipe.aggregation,
        # What takes the place of a group leaves it out as well.
        drop_zero_variance_groups=algorithm.drop_zero_variance_groups or sampling.enabled,
        entropy_coefficient=algorithm.entropy_coefficient,
        kl=algorithm.kl,
        mask_truncated_responses=algorithm.mask_truncated_responses,
        rollout_correction=resolve_correction(algorithm.rollout_correction),
        policy_filtration=_resolve_filtration(algorithm.policy_filtration),
        dynamic_sampling=resolve_dynamic_sampling(sampling),
    )


def advantage_type(algorithm: Algorithm) -> AdvantageType:
    """The job's choice, else the recipe's."""
    return algorithm.advantage.type or RECIPES[algorithm.type].advantage


def loss_type(algorithm: Algorithm) -> LossType:
    """The job's choice, else the recipe's."""
    return algorithm.loss.type or RECIPES[algorithm.type].loss


def _resolve_filtration(written: PolicyFiltration) -> PolicyFiltration:
    """With its values, where there is one."""
    if written.type is PolicyFiltrationType.NONE:
        return written
    exponent = (written.exponent or FILTRATION_EXPONENT) if written.type is PolicyFiltrationType.POWER else None
    return PolicyFiltration(type=written.type, exponent=exponent, scope=written.scope or FiltrationScope.BATCH)


def has_dynamic_sampling(algorithm: Algorithm) -> bool:
    """Whether groups are replaced: as the job says, else the recipe."""
    return resolve_algorithm(algorithm).dynamic_sampling is not None
