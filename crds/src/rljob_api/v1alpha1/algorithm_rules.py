"""Rules on the learning rule: blocks belong to the variants that are chosen, no setting is ignored, and what is chosen
fits the rest of the training. Rules within one part stand beside its type.

The API server also tries a rule on the default of its object, which is `{}` with nothing filled in, when it takes the
CRD: so the CEL of `Algorithm` asks for fields that are always there in a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

from rljob_api.rule import Rule, rule, wire_name
from rljob_api.v1alpha1.advantage import COMPARING, Advantage, AdvantageType
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.kl import KlPlacement
from rljob_api.v1alpha1.policy_filtration import FiltrationScope
from rljob_api.v1alpha1.policy_loss import Loss, LossType
from rljob_api.v1alpha1.recipes import RECIPES, advantage_type, has_dynamic_sampling, is_chosen_cel, loss_type
from rljob_api.v1alpha1.rollout_correction import RolloutCorrectionType
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.training import Training
from rljob_api.variants import Variants, block_name, may_be_left_out

_WITH_BASELINE = (*COMPARING, AdvantageType.REMAX)
"""What compares a response with others to the same prompt, or with the greedy one."""
_MAY_COMPARE = (*COMPARING, AdvantageType.FUNCTION)
_SAMPLING = [str(name) for name, recipe in RECIPES.items() if recipe.has_dynamic_sampling]
_IS_ON_CEL = (
    "(has(self.algorithm.dynamicSampling) ? self.algorithm.dynamicSampling.enabled"
    f" : self.algorithm.type in {_SAMPLING})"
)


def _block_rules(
    part: str,
    kind: type[Variants],
    variants: type[StrEnum],
    read: Callable[[Algorithm], Variants],
    chosen: Callable[[Algorithm], StrEnum],
) -> Iterator[Rule]:
    """A block that may be left out belongs to one variant of its part, which the job or its recipe chooses."""
    for variant in variants:
        block = kind.block_type(variant)
        if block is not None and may_be_left_out(block):
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
        wrong=f"the block `{block}` is ignored: the {part} that the job chooses is not {variant}",
        advice=f"remove the block, or write `type: {variant}` beside it",
        holds=lambda algorithm: read(algorithm).block(variant) is None or chosen(algorithm) is variant,
    )


def _responses_are_compared(training: Training) -> bool:
    return advantage_type(training.algorithm) not in COMPARING or training.rollout.group_size >= 2


def _responses_may_differ(training: Training) -> bool:
    return training.rollout.top_k != 1 or advantage_type(training.algorithm) not in _WITH_BASELINE


def _takes_kl_off_rewards(algorithm: Algorithm) -> bool:
    kl = algorithm.kl
    return (
        advantage_type(algorithm) is not AdvantageType.GDPO
        or kl.coefficient == 0
        or kl.placement is not KlPlacement.REWARD
    )


def _coefficient_stays_above_zero(training: Training) -> bool:
    adaptive = training.algorithm.kl.controller.adaptive
    return adaptive is None or training.batch_size * training.rollout.group_size < 5 * adaptive.horizon


def _draws_among_several(training: Training) -> bool:
    return training.algorithm.policy_filtration.scope is not FiltrationScope.GROUP or training.rollout.group_size >= 2


def _samples_all_or_corrects_nothing(training: Training) -> bool:
    correction, rollout = training.algorithm.rollout_correction, training.rollout
    is_none = correction.type is RolloutCorrectionType.NONE and correction.rejection is None
    return is_none or (rollout.top_p == 1 and rollout.top_k == 0)


def _reward_is_there(training: Training) -> bool:
    block = training.algorithm.dynamic_sampling
    return block is None or block.reward is None or block.reward in {each.name for each in training.rewards}


ALGORITHM_RULES = (
    *_block_rules("advantage", Advantage, AdvantageType, lambda algorithm: algorithm.advantage, advantage_type),
    *_block_rules("loss", Loss, LossType, lambda algorithm: algorithm.loss, loss_type),
    rule(
        Training,
        "Training.groupSize",
        field=".rollout.groupSize",
        cel=f"!{is_chosen_cel('self.algorithm', 'advantage', COMPARING)} || self.rollout.groupSize >= 2",
        wrong="the job's advantage compares responses to the same prompt and needs at least 2 of them",
        advice="set groupSize to 2 or more (8 is usual)",
        holds=_responses_are_compared,
    ),
    rule(
        Algorithm,
        "Algorithm.gdpoKl",
        field=".kl.placement",
        cel=f"!has(self.kl) || !has(self.type) || !{is_chosen_cel('self', 'advantage', ['GDPO'])}"
        " || self.kl.coefficient == 0.0 || self.kl.placement != 'Reward'",
        wrong="GDPO compares each of the job's rewards by itself, and the KL would be in none of them",
        advice="write `placement: Loss`",
        holds=_takes_kl_off_rewards,
    ),
    rule(
        Training,
        "Training.gdpoRewards",
        field=".rewards",
        cel=f"!{is_chosen_cel('self.algorithm', 'advantage', ['GDPO'])}"
        " || self.rewards.filter(reward, reward.weight != 0.0).size() >= 2",
        wrong="GDPO normalises each of several rewards by itself, and there is one whose weight is not 0",
        advice="add another reward, or choose GroupRelative advantages",
        holds=lambda t: (
            advantage_type(t.algorithm) is not AdvantageType.GDPO or sum(each.weight != 0 for each in t.rewards) >= 2
        ),
    ),
    rule(
        Training,
        "Training.topK",
        field=".rollout.topK",
        cel=f"self.rollout.topK != 1 || !{is_chosen_cel('self.algorithm', 'advantage', _WITH_BASELINE)}",
        wrong="every response is the greedy one to its prompt then, and the job's advantage, which compares it with "
        "others or with that one, is always 0",
        advice="write 0 to sample among all tokens, or 2 or more",
        holds=_responses_may_differ,
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
    rule(
        Training,
        "Training.dynamicSamplingGroups",
        field=".algorithm.dynamicSampling",
        cel=f"!{_IS_ON_CEL} || {is_chosen_cel('self.algorithm', 'advantage', _MAY_COMPARE)}",
        wrong="dynamicSampling replaces groups with equal scores, and the job's advantage (algorithm.advantage.type, or"
        " that of the recipe algorithm.type) compares no groups: it learns from equal scores, too",
        advice="remove it (with type: DAPO write dynamicSampling: {enabled: false}), or choose an advantage.type that"
        " does, such as GroupRelative",
        holds=lambda t: not has_dynamic_sampling(t.algorithm) or advantage_type(t.algorithm) in _MAY_COMPARE,
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
        f" || {is_chosen_cel('self.algorithm', 'advantage', _MAY_COMPARE)}",
        wrong="the job's advantage (algorithm.advantage.type, or that of the recipe algorithm.type) compares no groups:"
        " it learns from equal scores, too, and they would be lost",
        advice="remove it, or choose an advantage.type that compares them, such as GroupRelative",
        holds=lambda t: not t.algorithm.drop_zero_variance_groups or advantage_type(t.algorithm) in _MAY_COMPARE,
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
    rule(
        Training,
        "Training.policyFiltration",
        field=".algorithm.policyFiltration.scope",
        cel="!has(self.algorithm.policyFiltration.scope) || self.algorithm.policyFiltration.scope != 'Group'"
        " || self.rollout.groupSize >= 2",
        wrong="with rollout.groupSize 1 there is nothing to choose from in a group",
        advice="write Batch, or set groupSize to 2 or more",
        holds=_draws_among_several,
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
