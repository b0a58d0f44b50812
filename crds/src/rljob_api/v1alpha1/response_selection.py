"""The responses of a step that are trained on, a part of the algorithm: dynamic sampling replaces groups without a
learning signal; policy filtration resamples responses by their score before the update."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.rule import rule
from rljob_api.scalars import Flag, PositiveCount, PositiveNumber
from rljob_api.v1alpha1.reward import RewardName


class MaxRoundsPolicy(StrEnum):
    """What happens if the batch is not full after the last round."""

    FAIL = "Fail"
    """The run fails."""
    TRAIN_ON_FEWER = "TrainOnFewer"
    """The step trains on the groups that were found, spread evenly over its updates. The metric
    `actor/trained_fraction` is their fraction. If no group was found, the step changes nothing."""


class Refill(StrEnum):
    """When replacement prompts are requested for dropped groups."""

    ROUND = "Round"
    """When all groups of a round have scores. On CPUs a repeated step has the same bits."""
    CONTINUOUS = "Continuous"
    """While other groups are still being generated and scored. A repeated step has the same first batch of prompts and
    the same seeds, but not the same bits. So the replacement prompts may differ."""


class DynamicSampling(WireModel):
    """Replace groups whose scores are all equal with groups of new prompts, until the batch is full (DAPO,
    arXiv 2503.14476, section 3.2).

    A step uses the first groups with different scores in the order of the prompts. The prompts after the last of these
    groups are used again in the next step. Scores are compared before the KL term is applied."""

    enabled: Flag = True
    """Set to false to disable the dynamic sampling of the recipe."""
    max_rounds: PositiveCount | None = None
    """Largest number of generation rounds in one step, including the first. 10 when unset. With refill: Continuous a
    step requests at most maxRounds x batchSize prompts.

    The first round generates responses to batchSize prompts. Each further round has as many prompts as should fill the
    batch, estimated from the fraction of groups kept so far, and at most batchSize."""
    on_max_rounds: MaxRoundsPolicy | None = None
    """What happens if the batch is not full after maxRounds. Fail when unset."""
    refill: Refill | None = None
    """When replacement prompts are requested for dropped groups. Round when unset."""
    reward: RewardName | None = None
    """Name of an entry of training.rewards whose scores must differ within a group, for example `accuracy`. When unset,
    only the weighted sums of all rewards must differ.

    DAPO's paper compares the correctness of answers and not the length penalty."""


def _is_enabled_or_alone(block: DynamicSampling) -> bool:
    return block.enabled or (block.max_rounds, block.on_max_rounds, block.refill, block.reward) == (None,) * 4


DYNAMIC_SAMPLING_RULES = (
    rule(
        DynamicSampling,
        "DynamicSampling.enabled",
        field=".enabled",
        cel="!has(self.enabled) || self.enabled || !(has(self.maxRounds) || has(self.onMaxRounds) || has(self.refill)"
        " || has(self.reward))",
        wrong="the other fields of this block are not allowed with enabled: false, because they would be ignored",
        advice="remove the other fields, or set enabled: true",
        holds=_is_enabled_or_alone,
    ),
)


class PolicyFiltrationType(StrEnum):
    """Probability with which a response is drawn, as a function of its score."""

    NONE = "None"
    """No resampling: each response is used once."""
    POWER = "Power"
    """Proportional to |score|^exponent; uniform if all scores are 0."""
    MAX_MIN = "MaxMin"
    """Uniform among the responses with the highest or the lowest score; 0 for the others."""
    MAX_RANDOM = "MaxRandom"
    """Four times as large for each response with the highest score as for each other response."""


class FiltrationScope(StrEnum):
    """The set of responses among which scores are compared and responses are drawn."""

    BATCH = "Batch"
    """All responses of the step."""
    GROUP = "Group"
    """The responses to the same prompt; each group keeps its size."""


class PolicyFiltration(WireModel):
    """PF-PPO (Zhang et al. 2024, arXiv 2409.06957): resample the responses of a step with replacement, by score.

    The number of responses stays the same, and advantages are computed before. Useful for rewards that are most
    reliable at the highest and lowest scores, such as those of a reward model."""

    type: PolicyFiltrationType = PolicyFiltrationType.NONE
    exponent: PositiveNumber | None = None
    """Exponent for type Power; 2.0 when unset."""
    scope: FiltrationScope | None = None
    """The set of responses among which responses are drawn; Batch when unset."""


POLICY_FILTRATION_RULES = (
    rule(
        PolicyFiltration,
        "PolicyFiltration.exponent",
        field=".exponent",
        cel="!has(self.exponent) || !has(self.type) || self.type == 'Power'",
        wrong="is only allowed with type Power, because other types would ignore it",
        advice="remove it, or set type: Power",
        holds=lambda f: f.exponent is None or f.type is PolicyFiltrationType.POWER,
    ),
    rule(
        PolicyFiltration,
        "PolicyFiltration.scope",
        field=".scope",
        cel="!has(self.scope) || !has(self.type) || self.type != 'None'",
        wrong="would be ignored with type None",
        advice="remove it, or set another type",
        holds=lambda f: f.scope is None or f.type is not PolicyFiltrationType.NONE,
    ),
)
