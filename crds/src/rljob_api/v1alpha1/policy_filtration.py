"""Policy filtration, a part of the algorithm: responses are resampled by their score before the update."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.rule import rule
from rljob_api.scalars import PositiveNumber


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
