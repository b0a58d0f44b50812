"""Rules on the advantage that a job chooses."""

from __future__ import annotations

from rljob_api.v1alpha1.advantage import Advantage, AdvantageType
from rljob_api.v1alpha1.chosen_part import block_rule, chosen_cel
from rljob_api.v1alpha1.recipes import advantage_type
from rljob_api.v1alpha1.rule import rule, union_rules
from rljob_api.v1alpha1.training import Training


def _responses_are_compared(training: Training) -> bool:
    compared = advantage_type(training.algorithm) is AdvantageType.GROUP_RELATIVE
    return not compared or training.rollout.group_size >= 2


ADVANTAGE_RULES = (
    *union_rules(Advantage, (("Function", "function", lambda advantage: (advantage.type, advantage.function)),)),
    block_rule(
        ".advantage.groupRelative",
        chosen_cel("self", "advantage"),
        AdvantageType.GROUP_RELATIVE,
        lambda a: a.advantage.group_relative is None or advantage_type(a) is AdvantageType.GROUP_RELATIVE,
    ),
    rule(
        Training,
        "Training.groupSize",
        field=".rollout.groupSize",
        cel=f"{chosen_cel('self.algorithm', 'advantage')} != 'GroupRelative' || self.rollout.groupSize >= 2",
        wrong="GroupRelative advantages compare responses to the same prompt and need at least 2 of them",
        advice="set groupSize to 2 or more (8 is usual)",
        holds=_responses_are_compared,
    ),
)
