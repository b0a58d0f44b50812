"""Rules on dynamic sampling: it belongs to learning rules that compare responses to the same prompt."""

from __future__ import annotations

from rljob_api.rule import rule
from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_api.v1alpha1.advantage_rules import COMPARING
from rljob_api.v1alpha1.chosen_part import is_chosen_cel
from rljob_api.v1alpha1.dynamic_sampling import DynamicSampling
from rljob_api.v1alpha1.recipes import RECIPES, advantage_type, has_dynamic_sampling
from rljob_api.v1alpha1.training import Training

_RECIPES = [str(name) for name, recipe in RECIPES.items() if recipe.has_dynamic_sampling]
_IS_ON_CEL = (
    "(has(self.algorithm.dynamicSampling) ? self.algorithm.dynamicSampling.enabled"
    f" : self.algorithm.type in {_RECIPES})"
)
_COMPARING = (*COMPARING, AdvantageType.FUNCTION)


def _is_in_use(block: DynamicSampling) -> bool:
    return block.enabled or (block.max_rounds, block.on_max_rounds, block.reward) == (None, None, None)


def _reward_is_there(training: Training) -> bool:
    block = training.algorithm.dynamic_sampling
    return block is None or block.reward is None or block.reward in {each.name for each in training.rewards}


DYNAMIC_SAMPLING_RULES = (
    rule(
        DynamicSampling,
        "DynamicSampling.enabled",
        field=".enabled",
        cel="!has(self.enabled) || self.enabled || !(has(self.maxRounds) || has(self.onMaxRounds) || has(self.reward))",
        wrong="the other fields of the block are ignored",
        advice="remove them, or write enabled: true",
        holds=_is_in_use,
    ),
    rule(
        Training,
        "Training.dynamicSamplingGroups",
        field=".algorithm.dynamicSampling",
        cel=f"!{_IS_ON_CEL} || {is_chosen_cel('self.algorithm', 'advantage', _COMPARING)}",
        wrong="dynamicSampling replaces groups with equal scores, and the job's advantage (algorithm.advantage.type, or"
        " that of the recipe algorithm.type) compares no groups: it learns from equal scores, too",
        advice="remove it (with type: DAPO write dynamicSampling: {enabled: false}), or choose an advantage.type that"
        " does, such as GroupRelative",
        holds=lambda t: not has_dynamic_sampling(t.algorithm) or advantage_type(t.algorithm) in _COMPARING,
    ),
    rule(
        Training,
        "Training.dynamicSamplingPassAtK",
        field=".algorithm.dynamicSampling",
        cel=f"!{_IS_ON_CEL} || !{is_chosen_cel('self.algorithm', 'advantage', ['GroupRelativePassAtK'])}",
        wrong="dynamicSampling keeps groups whose scores differ, and GroupRelativePassAtK learns only from those in"
        " which one response is better than all others",
        advice="remove it (with type: DAPO write dynamicSampling: {enabled: false}), or choose GroupRelative",
        holds=lambda t: (
            not has_dynamic_sampling(t.algorithm)
            or advantage_type(t.algorithm) is not AdvantageType.GROUP_RELATIVE_PASS_AT_K
        ),
    ),
    rule(
        Training,
        "Training.dropZeroVarianceGroupsCompared",
        field=".algorithm.dropZeroVarianceGroups",
        cel="!has(self.algorithm.dropZeroVarianceGroups) || !self.algorithm.dropZeroVarianceGroups"
        f" || {is_chosen_cel('self.algorithm', 'advantage', _COMPARING)}",
        wrong="the job's advantage (algorithm.advantage.type, or that of the recipe algorithm.type) compares no groups:"
        " it learns from equal scores, too, and they would be lost",
        advice="remove it, or choose an advantage.type that compares them, such as GroupRelative",
        holds=lambda t: not t.algorithm.drop_zero_variance_groups or advantage_type(t.algorithm) in _COMPARING,
    ),
    rule(
        Training,
        "Training.dynamicSamplingGroupSize",
        field=".algorithm.dynamicSampling",
        cel=f"!{_IS_ON_CEL} || self.rollout.groupSize >= 2",
        wrong="with rollout.groupSize 1 all scores of a group are equal, and the batch would never be full",
        advice="write dynamicSampling: {enabled: false}, or set groupSize to 2 or more",
        holds=lambda t: not has_dynamic_sampling(t.algorithm) or t.rollout.group_size >= 2,
    ),
    rule(
        Training,
        "Training.dynamicSamplingDrops",
        field=".algorithm.dropZeroVarianceGroups",
        cel=f"!{_IS_ON_CEL} || !has(self.algorithm.dropZeroVarianceGroups) || self.algorithm.dropZeroVarianceGroups",
        wrong="dynamicSampling leaves out the groups that this would keep",
        advice="remove it, or write dynamicSampling: {enabled: false}",
        holds=lambda t: not has_dynamic_sampling(t.algorithm) or t.algorithm.drop_zero_variance_groups is not False,
    ),
    rule(
        Training,
        "Training.dynamicSamplingReward",
        field=".algorithm.dynamicSampling.reward",
        cel="!has(self.algorithm.dynamicSampling) || !has(self.algorithm.dynamicSampling.reward)"
        " || self.rewards.exists(each, each.name == self.algorithm.dynamicSampling.reward)",
        wrong="must be the name of one of training.rewards",
        advice="name one of them, or remove it to compare their weighted sums",
        holds=_reward_is_there,
    ),
)
