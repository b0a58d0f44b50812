"""Recipes, and the resolution of a job's algorithm: unset fields get their value, and each part keeps only the block of
the chosen variant.

The trainer uses resolved algorithms only. `rljob validate --resolved` and the run folder show them in a job file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from rljob_api.base import WireModel
from rljob_api.v1alpha1.advantage import MAY_NEED_CRITIC, AdvantageType, GroupRelative
from rljob_api.v1alpha1.algorithm import Algorithm, AlgorithmType, LossAggregation
from rljob_api.v1alpha1.policy_loss import DPPO_THRESHOLDS, NO_DUAL_CLIP, Clipped, Dppo, LossType
from rljob_api.v1alpha1.response_selection import (
    DynamicSampling,
    FiltrationScope,
    MaxRoundsPolicy,
    PolicyFiltration,
    PolicyFiltrationType,
    Refill,
)
from rljob_api.v1alpha1.rollout_correction import (
    MASKED_CORRECTIONS,
    MAX_RATIO,
    RejectionEstimator,
    RolloutCorrection,
    RolloutCorrectionType,
)
from rljob_api.variants import Variants, is_optional_block

MAX_ROUNDS = 10
"""Default of `dynamicSampling.maxRounds`, as in verl's DAPO recipe."""
FILTRATION_EXPONENT = 2.0
"""Default of `policyFiltration.exponent` (verl: `weight_pow`)."""
BY_STD = GroupRelative(normalize_by_std=True)
"""Group-relative advantages as in GRPO: divided by the standard deviation of the group."""
DUAL_CLIPPED = Clipped(clip_ratio_low=0.2, clip_ratio_high=0.2, dual_clip_ratio=3.0)
"""The clipped loss as in GRPO, with dual clip."""

ValueT = TypeVar("ValueT")
BlockT = TypeVar("BlockT", bound=WireModel)
VariantsT = TypeVar("VariantsT", bound=Variants)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The parts and settings of a recipe. `group_relative` and `clipped` also apply if the recipe has another variant,
    and the job overrides it with GroupRelative or Clipped."""

    advantage: AdvantageType
    loss: LossType
    aggregation: LossAggregation
    group_relative: GroupRelative = BY_STD
    clipped: Clipped = DUAL_CLIPPED
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
            group_relative=GroupRelative(normalize_by_std=False),
            clipped=Clipped(clip_ratio_low=0.2, clip_ratio_high=0.2, dual_clip_ratio=NO_DUAL_CLIP),
        ),
        AlgorithmType.DAPO: Recipe(
            advantage=AdvantageType.GROUP_RELATIVE,
            loss=LossType.CLIPPED,
            aggregation=LossAggregation.TOKEN_MEAN,
            clipped=Clipped(clip_ratio_low=0.2, clip_ratio_high=0.28, dual_clip_ratio=NO_DUAL_CLIP),
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
            clipped=Clipped(clip_ratio_low=0.2, clip_ratio_high=0.2, dual_clip_ratio=NO_DUAL_CLIP),
        ),
        AlgorithmType.GSPO: Recipe(
            advantage=AdvantageType.GROUP_RELATIVE,
            loss=LossType.GSPO,
            aggregation=LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN,
        ),
        AlgorithmType.CISPO: Recipe(
            advantage=AdvantageType.GROUP_RELATIVE, loss=LossType.CISPO, aggregation=LossAggregation.TOKEN_MEAN
        ),
        AlgorithmType.DISTILLATION: Recipe(
            advantage=AdvantageType.DISTILLATION, loss=LossType.CLIPPED, aggregation=LossAggregation.TOKEN_MEAN
        ),
    }
)


def resolve_algorithm(algorithm: Algorithm) -> Algorithm:
    """The recipe with the job's overrides. Resolving the result again does not change it.

    Only fields that have no meaning with the chosen settings are None, such as the lower bound of a truncated ratio.
    Read all other optional fields with `resolved_value`."""
    recipe = RECIPES[algorithm.type]
    sampling = _resolved_sampling(algorithm.dynamic_sampling, recipe)
    return algorithm.model_copy(
        update={
            "advantage": _resolved_part(algorithm.advantage, advantage_type(algorithm), recipe),
            "loss": _resolved_part(algorithm.loss, loss_type(algorithm), recipe),
            "aggregation": algorithm.aggregation or recipe.aggregation,
            # Dynamic sampling replaces groups whose scores are all equal, so it also drops them.
            "drop_zero_variance_groups": algorithm.drop_zero_variance_groups or sampling.enabled,
            "dynamic_sampling": sampling,
            "rollout_correction": _resolved_correction(algorithm.rollout_correction),
            "policy_filtration": _resolved_filtration(algorithm.policy_filtration),
        }
    )


def resolved_value(value: ValueT | None) -> ValueT:
    """The value of an optional field of a resolved algorithm."""
    assert value is not None, "call resolve_algorithm first"
    return value


def advantage_type(algorithm: Algorithm) -> AdvantageType:
    """The advantage that the job chooses, else that of the recipe."""
    return algorithm.advantage.type or RECIPES[algorithm.type].advantage


def loss_type(algorithm: Algorithm) -> LossType:
    """The policy loss that the job chooses, else that of the recipe."""
    return algorithm.loss.type or RECIPES[algorithm.type].loss


def may_need_critic(algorithm: Algorithm) -> bool:
    """Whether the advantage is GAE, or a user-defined function that may need values."""
    return advantage_type(algorithm) in MAY_NEED_CRITIC


def may_need_critic_cel(algorithm: str) -> str:
    """CEL for `may_need_critic`."""
    return is_chosen_cel(algorithm, "advantage", MAY_NEED_CRITIC)


def is_distillation(algorithm: Algorithm) -> bool:
    """Whether the policy learns from a teacher's log-probabilities, and not from rewards."""
    return advantage_type(algorithm) is AdvantageType.DISTILLATION


def is_distillation_cel(algorithm: str) -> str:
    """CEL for `is_distillation`."""
    return is_chosen_cel(algorithm, "advantage", [AdvantageType.DISTILLATION])


def has_dynamic_sampling(algorithm: Algorithm) -> bool:
    """Whether dynamic sampling is enabled, by the job or by its recipe."""
    return _resolved_sampling(algorithm.dynamic_sampling, RECIPES[algorithm.type]).enabled


def is_chosen_cel(algorithm: str, part: str, types: Collection[str]) -> str:
    """CEL for whether `advantage_type` or `loss_type` is one of `types`; `part` is `advantage` or `loss`.

    The expression lists only the matching recipes. A table of all recipes would make the CRD too large, because many
    rules contain this expression."""
    chosen_type, recipe = f"{algorithm}.{part}.type", f"{algorithm}.type"
    by_recipe = {name: {"advantage": each.advantage, "loss": each.loss}[part] for name, each in RECIPES.items()}
    recipes = [name for name, variant in by_recipe.items() if variant in types]
    if recipes and recipes == [name for name in RECIPES if name in types]:
        # Variant and recipe have the same name, so either of them can be compared.
        return f"({_is_one_of_cel(f'(has({chosen_type}) ? {chosen_type} : {recipe})', types)})"
    if not recipes:
        return f"(has({chosen_type}) && {_is_one_of_cel(chosen_type, types)})"
    return f"(has({chosen_type}) ? {_is_one_of_cel(chosen_type, types)} : {_is_one_of_cel(recipe, recipes)})"


def _is_one_of_cel(value: str, names: Collection[str]) -> str:
    """CEL for whether a value is one of these names."""
    texts = [str(name) for name in names]
    return f"{value} in {texts}" if len(texts) > 1 else f"{value} == '{texts[0]}'"


def _resolved_part(part: VariantsT, chosen: AdvantageType | LossType, recipe: Recipe) -> VariantsT:
    """The part with only the chosen variant and its block."""
    kind, block = part.block_type(chosen), part.block(chosen)
    if block is None and kind is not None and is_optional_block(kind):
        block = kind()
    match block:
        case GroupRelative():
            block = _with_defaults(block, recipe.group_relative)
        case Clipped():
            block = _with_defaults(block, recipe.clipped)
        case Dppo():
            threshold = DPPO_THRESHOLDS[block.divergence]
            block = _with_defaults(block, Dppo(threshold_low=threshold, threshold_high=threshold))
    return type(part).of(chosen, block)


def _resolved_sampling(block: DynamicSampling | None, recipe: Recipe) -> DynamicSampling:
    block = block or DynamicSampling(enabled=recipe.has_dynamic_sampling)
    if not block.enabled:
        return block
    defaults = DynamicSampling(max_rounds=MAX_ROUNDS, on_max_rounds=MaxRoundsPolicy.FAIL, refill=Refill.ROUND)
    return _with_defaults(block, defaults)


def _resolved_correction(block: RolloutCorrection) -> RolloutCorrection:
    rejection = block.rejection
    if rejection is not None and rejection.estimator is RejectionEstimator.K1:
        rejection = rejection.model_copy(update={"min": rejection.min or 1.0 / rejection.max})
    highest, lowest = block.max_ratio, block.min_ratio
    if block.type is not RolloutCorrectionType.NONE:
        highest = highest or MAX_RATIO
        lowest = lowest or (1.0 / highest if block.type in MASKED_CORRECTIONS else None)
    return block.model_copy(update={"max_ratio": highest, "min_ratio": lowest, "rejection": rejection})


def _resolved_filtration(block: PolicyFiltration) -> PolicyFiltration:
    if block.type is PolicyFiltrationType.NONE:
        return block
    exponent = FILTRATION_EXPONENT if block.type is PolicyFiltrationType.POWER else None
    return _with_defaults(block, PolicyFiltration(exponent=exponent, scope=FiltrationScope.BATCH))


def _with_defaults(block: BlockT, defaults: BlockT) -> BlockT:
    """The block with unset fields filled from `defaults`."""
    set_fields = {name for name, value in block if value is not None}
    return block.model_copy(update={name: value for name, value in defaults if name not in set_fields})
