"""Rules on the advantage that a job chooses."""

from __future__ import annotations

from collections.abc import Callable

from rljob_api.rule import Rule, rule, union_rules
from rljob_api.v1alpha1.advantage import Advantage, AdvantageType
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.chosen_part import block_rule, is_chosen_cel
from rljob_api.v1alpha1.kl import KlPlacement
from rljob_api.v1alpha1.recipes import advantage_type
from rljob_api.v1alpha1.training import Training

COMPARING = (
    AdvantageType.GROUP_RELATIVE,
    AdvantageType.GROUP_RELATIVE_PASS_AT_K,
    AdvantageType.GDPO,
    AdvantageType.LEAVE_ONE_OUT,
    AdvantageType.REINFORCE_PLUS_PLUS_BASELINE,
    AdvantageType.OPO,
    AdvantageType.GPG,
    AdvantageType.OPTIMAL_TOKEN_BASELINE,
)
"""What compares responses to the same prompt."""


WITH_BASELINE = (*COMPARING, AdvantageType.REMAX)
"""What compares a response with others to the same prompt, or with the greedy one."""


def _block_rule(block: str, variant: AdvantageType, read: Callable[[Advantage], object]) -> Rule:
    return block_rule(
        f".advantage.{block}",
        variant,
        lambda a: read(a.advantage) is None or advantage_type(a) is variant,
    )


def _responses_are_compared(training: Training) -> bool:
    return advantage_type(training.algorithm) not in COMPARING or training.rollout.group_size >= 2


def _responses_may_differ(training: Training) -> bool:
    return training.rollout.top_k != 1 or advantage_type(training.algorithm) not in WITH_BASELINE


def _takes_kl_off_rewards(algorithm: Algorithm) -> bool:
    kl = algorithm.kl
    return (
        advantage_type(algorithm) is not AdvantageType.GDPO
        or kl.coefficient == 0
        or kl.placement is not KlPlacement.REWARD
    )


ADVANTAGE_RULES = (
    *union_rules(Advantage, (("Function", "function", lambda advantage: (advantage.type, advantage.function)),)),
    _block_rule("groupRelative", AdvantageType.GROUP_RELATIVE, lambda a: a.group_relative),
    _block_rule("groupRelativePassAtK", AdvantageType.GROUP_RELATIVE_PASS_AT_K, lambda a: a.group_relative_pass_at_k),
    _block_rule("reinforcePlusPlus", AdvantageType.REINFORCE_PLUS_PLUS, lambda a: a.reinforce_plus_plus),
    _block_rule("gae", AdvantageType.GAE, lambda a: a.gae),
    _block_rule("optimalTokenBaseline", AdvantageType.OPTIMAL_TOKEN_BASELINE, lambda a: a.optimal_token_baseline),
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
        cel=f"self.rollout.topK != 1 || !{is_chosen_cel('self.algorithm', 'advantage', WITH_BASELINE)}",
        wrong="every response is the greedy one to its prompt then, and the job's advantage, which compares it with "
        "others or with that one, is always 0",
        advice="write 0 to sample among all tokens, or 2 or more",
        holds=_responses_may_differ,
    ),
)
