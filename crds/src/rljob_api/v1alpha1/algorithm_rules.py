"""Rules on the algorithm: a block requires its variant, settings that would be ignored are rejected, and the algorithm
fits the other settings of the training. Rules within one part of the algorithm are in the file of that part.

When a CRD is created, the API server also evaluates each rule on the default of its type, which is `{}` without the
defaults of its fields. So the CEL of rules on `Algorithm` checks with `has` even fields that every job has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

from rljob_api.rule import Rule, rule, wire_name
from rljob_api.v1alpha1.advantage import GROUP_ADVANTAGES, Advantage, AdvantageType
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.kl import KlPlacement
from rljob_api.v1alpha1.policy_loss import Loss, LossType
from rljob_api.v1alpha1.recipes import RECIPES, advantage_type, has_dynamic_sampling, is_chosen_cel, loss_type
from rljob_api.v1alpha1.response_selection import FiltrationScope, Refill
from rljob_api.v1alpha1.reward import RewardType
from rljob_api.v1alpha1.rollout_correction import OldLogprobs
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.training import IncompleteGroup, Training
from rljob_api.variants import Variants, block_name, is_optional_block

_WITH_BASELINE = (*GROUP_ADVANTAGES, AdvantageType.REMAX)
"""Advantages that compare a response with other responses to the same prompt, or with the greedy response."""
_MAY_COMPARE_GROUPS = (*GROUP_ADVANTAGES, AdvantageType.FUNCTION)
"""Advantages that compare responses to the same prompt, or may do so (a user-defined function)."""
_RECIPES_WITH_SAMPLING = [str(name) for name, recipe in RECIPES.items() if recipe.has_dynamic_sampling]
_SAMPLING_CEL = (
    "(has(self.algorithm.dynamicSampling) ? self.algorithm.dynamicSampling.enabled"
    f" : self.algorithm.type in {_RECIPES_WITH_SAMPLING})"
)


def _block_rules(
    part: str,
    kind: type[Variants],
    variants: type[StrEnum],
    read: Callable[[Algorithm], Variants],
    chosen: Callable[[Algorithm], StrEnum],
) -> Iterator[Rule]:
    """The rules that an optional block of `part` (advantage or loss) is set only if the job or its recipe chooses the
    block's variant."""
    for variant in variants:
        block = kind.block_type(variant)
        if block is not None and is_optional_block(block):
            yield _block_rule(part, wire_name(kind, block_name(variant)), variant, read, chosen)


def _block_rule(
    part: str,
    block: str,
    variant: StrEnum,
    read: Callable[[Algorithm], Variants],
    chosen: Callable[[Algorithm], StrEnum],
) -> Rule:
    return rule(
        Algorithm,
        f"Algorithm.{part}.{block}",
        field=f".{part}.{block}",
        cel=f"!has(self.{part}) || !has(self.{part}.{block}) || {is_chosen_cel('self', part, [variant])}",
        wrong=f"would be ignored, because the job's {part} is not {variant}",
        advice=f"remove the block `{block}`, or set {part}.type: {variant}",
        holds=lambda algorithm: read(algorithm).block(variant) is None or chosen(algorithm) is variant,
    )


def _group_size_fits_advantage(training: Training) -> bool:
    return advantage_type(training.algorithm) not in GROUP_ADVANTAGES or training.rollout.group_size >= 2


def _top_k_fits_advantage(training: Training) -> bool:
    return training.rollout.top_k != 1 or advantage_type(training.algorithm) not in _WITH_BASELINE


def _gdpo_has_no_kl_in_reward(algorithm: Algorithm) -> bool:
    kl = algorithm.kl
    return (
        advantage_type(algorithm) is not AdvantageType.GDPO
        or kl.coefficient == 0
        or kl.placement is not KlPlacement.REWARD
    )


def _kl_coefficient_stays_positive(training: Training) -> bool:
    adaptive = training.algorithm.kl.controller.adaptive
    return adaptive is None or training.batch_size * training.rollout.group_size < 5 * adaptive.horizon


def _filtration_has_several_responses(training: Training) -> bool:
    return training.algorithm.policy_filtration.scope is not FiltrationScope.GROUP or training.rollout.group_size >= 2


def _sampling_fits_correction(training: Training) -> bool:
    rollout = training.rollout
    has_all_tokens = rollout.top_p == 1 and rollout.top_k == 0
    return has_all_tokens or not training.algorithm.rollout_correction.uses_rollout_logprobs


def _sampling_reward_exists(training: Training) -> bool:
    block = training.algorithm.dynamic_sampling
    return block is None or block.reward is None or block.reward in {each.name for each in training.rewards}


def _is_continuous(training: Training) -> bool:
    block = training.algorithm.dynamic_sampling
    return block is not None and block.refill is Refill.CONTINUOUS


def _can_refill(training: Training) -> bool:
    return not _is_continuous(training) or all(each.type is not RewardType.REWARD_MODEL for each in training.rewards)


ALGORITHM_RULES = (
    *_block_rules("advantage", Advantage, AdvantageType, lambda algorithm: algorithm.advantage, advantage_type),
    *_block_rules("loss", Loss, LossType, lambda algorithm: algorithm.loss, loss_type),
    rule(
        Training,
        "Training.groupSize",
        field=".rollout.groupSize",
        cel=f"!{is_chosen_cel('self.algorithm', 'advantage', GROUP_ADVANTAGES)} || self.rollout.groupSize >= 2",
        wrong="must be at least 2, because the job's advantage compares responses to the same prompt",
        advice="increase groupSize, for example to 8",
        holds=_group_size_fits_advantage,
    ),
    rule(
        Algorithm,
        "Algorithm.gdpoKl",
        field=".kl.placement",
        cel=f"!has(self.kl) || !has(self.type) || !{is_chosen_cel('self', 'advantage', ['GDPO'])}"
        " || self.kl.coefficient == 0.0 || self.kl.placement != 'Reward'",
        wrong="must not be Reward with advantage GDPO, which normalizes each reward separately",
        advice="set kl.placement: Loss",
        holds=_gdpo_has_no_kl_in_reward,
    ),
    rule(
        Algorithm,
        "Algorithm.oldLogprobs",
        field=".rolloutCorrection.oldLogprobs",
        cel="!has(self.rolloutCorrection) || !has(self.rolloutCorrection.oldLogprobs) || !has(self.type)"
        " || self.rolloutCorrection.oldLogprobs != 'Rollout'"
        f" || !{is_chosen_cel('self', 'advantage', ['OptimalTokenBaseline'])}"
        " && !(has(self.loss) && has(self.loss.type) && self.loss.type == 'GPG')",
        wrong="must not be Rollout with advantage OptimalTokenBaseline, which needs the trainer's probabilities, nor "
        "with loss GPG, which uses no old ones",
        advice="set oldLogprobs: Trainer, or another advantage or loss",
        holds=lambda algorithm: (
            algorithm.rollout_correction.old_logprobs is not OldLogprobs.ROLLOUT
            or (
                advantage_type(algorithm) is not AdvantageType.OPTIMAL_TOKEN_BASELINE
                and loss_type(algorithm) is not LossType.GPG
            )
        ),
    ),
    rule(
        Training,
        "Training.gdpoRewards",
        field=".rewards",
        cel=f"!{is_chosen_cel('self.algorithm', 'advantage', ['GDPO'])}"
        " || self.rewards.filter(reward, reward.weight != 0.0).size() >= 2",
        wrong="advantage GDPO requires at least two rewards with a weight other than 0",
        advice="add a reward, give a second one a weight other than 0, or set advantage.type: GroupRelative",
        holds=lambda t: (
            advantage_type(t.algorithm) is not AdvantageType.GDPO or sum(each.weight != 0 for each in t.rewards) >= 2
        ),
    ),
    rule(
        Training,
        "Training.topK",
        field=".rollout.topK",
        cel=f"self.rollout.topK != 1 || !{is_chosen_cel('self.algorithm', 'advantage', _WITH_BASELINE)}",
        wrong="must not be 1: all responses to a prompt would be equal, and the job's advantage always 0",
        advice="set topK to 0 to sample from all tokens, or to 2 or more",
        holds=_top_k_fits_advantage,
    ),
    rule(
        Training,
        "Training.klHorizon",
        field=".algorithm.kl.controller.adaptive.horizon",
        cel="!has(self.algorithm.kl.controller.adaptive)"
        " || self.batchSize * self.rollout.groupSize < 5 * self.algorithm.kl.controller.adaptive.horizon",
        wrong="must be above batchSize * rollout.groupSize / 5, or one step could set the KL coefficient to 0",
        advice="increase horizon to several times batchSize * rollout.groupSize",
        holds=_kl_coefficient_stays_positive,
    ),
    rule(
        Training,
        "Training.dropZeroVarianceGroups",
        field=".algorithm.dropZeroVarianceGroups",
        cel="!has(self.algorithm.dropZeroVarianceGroups) || !self.algorithm.dropZeroVarianceGroups"
        " || self.rollout.groupSize >= 2",
        wrong="must not be true with rollout.groupSize 1, because all groups would be dropped",
        advice="set dropZeroVarianceGroups to false, or groupSize to 2 or more",
        holds=lambda t: not t.algorithm.drop_zero_variance_groups or t.rollout.group_size >= 2,
    ),
    rule(
        Training,
        "Training.dynamicSamplingGroups",
        field=".algorithm.dynamicSampling",
        cel=f"!{_SAMPLING_CEL} || {is_chosen_cel('self.algorithm', 'advantage', _MAY_COMPARE_GROUPS)}",
        wrong="requires an advantage that compares responses to the same prompt; the job's advantage (advantage.type or"
        " that of the recipe) also learns from groups with equal scores",
        advice="set dynamicSampling: {enabled: false}, or choose for example advantage.type: GroupRelative",
        holds=lambda t: not has_dynamic_sampling(t.algorithm) or advantage_type(t.algorithm) in _MAY_COMPARE_GROUPS,
    ),
    rule(
        Training,
        "Training.dynamicSamplingPassAtK",
        field=".algorithm.dynamicSampling",
        cel=f"!{_SAMPLING_CEL} || !{is_chosen_cel('self.algorithm', 'advantage', ['GroupRelativePassAtK'])}",
        wrong="does not work with advantage GroupRelativePassAtK, which learns only from groups with a single best"
        " response and not from all groups with different scores",
        advice="set dynamicSampling: {enabled: false}, or choose advantage.type: GroupRelative",
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
        f" || {is_chosen_cel('self.algorithm', 'advantage', _MAY_COMPARE_GROUPS)}",
        wrong="requires an advantage that compares responses to the same prompt; the job's advantage (advantage.type or"
        " that of the recipe) also learns from groups with equal scores, which would be dropped",
        advice="remove dropZeroVarianceGroups, or choose for example advantage.type: GroupRelative",
        holds=lambda t: not t.algorithm.drop_zero_variance_groups or advantage_type(t.algorithm) in _MAY_COMPARE_GROUPS,
    ),
    rule(
        Training,
        "Training.dynamicSamplingGroupSize",
        field=".algorithm.dynamicSampling",
        cel=f"!{_SAMPLING_CEL} || self.rollout.groupSize >= 2",
        wrong="requires rollout.groupSize of at least 2: the score of a single response cannot differ, so the batch"
        " would never be full",
        advice="set dynamicSampling: {enabled: false}, or increase groupSize",
        holds=lambda t: not has_dynamic_sampling(t.algorithm) or t.rollout.group_size >= 2,
    ),
    rule(
        Training,
        "Training.dynamicSamplingDrops",
        field=".algorithm.dropZeroVarianceGroups",
        cel=f"!{_SAMPLING_CEL} || !has(self.algorithm.dropZeroVarianceGroups) || self.algorithm.dropZeroVarianceGroups",
        wrong="must not be false with dynamicSampling, which always drops groups whose scores are all equal",
        advice="remove dropZeroVarianceGroups, or set dynamicSampling: {enabled: false}",
        holds=lambda t: not has_dynamic_sampling(t.algorithm) or t.algorithm.drop_zero_variance_groups is not False,
    ),
    rule(
        Training,
        "Training.dynamicSamplingReward",
        field=".algorithm.dynamicSampling.reward",
        cel="!has(self.algorithm.dynamicSampling) || !has(self.algorithm.dynamicSampling.reward)"
        " || self.rewards.exists(each, each.name == self.algorithm.dynamicSampling.reward)",
        wrong="must be the name of one of training.rewards",
        advice="use the name of a reward, or remove this field to compare the weighted sums of all rewards",
        holds=_sampling_reward_exists,
    ),
    rule(
        Training,
        "Training.dynamicSamplingRefill",
        field=".algorithm.dynamicSampling.refill",
        cel="!has(self.algorithm.dynamicSampling) || !has(self.algorithm.dynamicSampling.refill)"
        " || self.algorithm.dynamicSampling.refill != 'Continuous'"
        " || !self.rewards.exists(each, each.type == 'RewardModel')",
        wrong="must not be Continuous with a reward of type RewardModel, whose model scores after all responses",
        advice="set refill: Round",
        holds=_can_refill,
    ),
    rule(
        Training,
        "Training.onIncompleteGroup",
        field=".onIncompleteGroup",
        cel="self.onIncompleteGroup != 'Refill' || !has(self.algorithm.dynamicSampling)"
        " || !has(self.algorithm.dynamicSampling.refill) || self.algorithm.dynamicSampling.refill != 'Continuous'",
        wrong="must not be Refill with algorithm.dynamicSampling.refill: Continuous, which replaces groups by itself",
        advice="set onIncompleteGroup: TrainOnRest, or refill: Round",
        holds=lambda t: t.on_incomplete_group is not IncompleteGroup.REFILL or not _is_continuous(t),
    ),
    rule(
        Training,
        "Training.policyFiltration",
        field=".algorithm.policyFiltration.scope",
        cel="!has(self.algorithm.policyFiltration.scope) || self.algorithm.policyFiltration.scope != 'Group'"
        " || self.rollout.groupSize >= 2",
        wrong="must not be Group with rollout.groupSize 1, because each group has a single response",
        advice="set scope: Batch, or groupSize to 2 or more",
        holds=_filtration_has_several_responses,
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.syncEverySteps",
        field=".checkpoint.everySteps",
        cel="self.checkpoint.everySteps % self.training.rollout.syncEverySteps == 0",
        wrong="must be a multiple of training.rollout.syncEverySteps, because a resumed run starts with the newest"
        " weights and would differ from an uninterrupted one",
        advice="change checkpoint.everySteps or training.rollout.syncEverySteps",
        holds=lambda spec: spec.checkpoint.every_steps % spec.training.rollout.sync_every_steps == 0,
    ),
    rule(
        Training,
        "Training.rolloutCorrection",
        field=".algorithm.rolloutCorrection",
        cel="(self.rollout.topP == 1.0 && self.rollout.topK == 0) || ((!has(self.algorithm.rolloutCorrection.type)"
        " || self.algorithm.rolloutCorrection.type == 'None') && !has(self.algorithm.rolloutCorrection.rejection)"
        " && (!has(self.algorithm.rolloutCorrection.oldLogprobs)"
        " || self.algorithm.rolloutCorrection.oldLogprobs != 'Rollout'))",
        wrong="requires rollout.topP: 1 and rollout.topK: 0: otherwise the rollout engine's log-probabilities belong to"
        " a truncated distribution and cannot be compared with the trainer's",
        advice="set topP: 1 and topK: 0, or remove rolloutCorrection",
        holds=_sampling_fits_correction,
    ),
)
