"""Which responses of a step are learned from, and how often: one part of a learning rule (`algorithm`)."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.rule import rule
from rljob_api.scalars import PositiveNumber


class PolicyFiltrationType(StrEnum):
    """How likely a response is to be drawn, by its score."""

    NONE = "None"
    """Nothing is drawn: each response is learned from once."""
    POWER = "Power"
    """As |score|^exponent; all alike where all scores are 0."""
    MAX_MIN = "MaxMin"
    """Those with the highest and with the lowest score alike, no others."""
    MAX_RANDOM = "MaxRandom"
    """Those with the highest score four times as likely as each of the others."""


class FiltrationScope(StrEnum):
    """Which responses are compared, and drawn from."""

    BATCH = "Batch"
    """All of the step."""
    GROUP = "Group"
    """Those to the same prompt, of which as many are drawn as there are."""


class PolicyFiltration(WireModel):
    """PF-PPO (Zhang et al. 2024, arXiv 2409.06957): after their advantages are known, the responses of a step are drawn
    anew with replacement, as many as there are, by their scores. For rewards that are more to be trusted at their ends,
    such as a reward model's."""

    type: PolicyFiltrationType = PolicyFiltrationType.NONE
    exponent: PositiveNumber | None = None
    """For Power; 2.0 when unset."""
    scope: FiltrationScope | None = None
    """Batch when unset."""


POLICY_FILTRATION_RULES = (
    rule(
        PolicyFiltration,
        "PolicyFiltration.exponent",
        field=".exponent",
        cel="!has(self.exponent) || !has(self.type) || self.type == 'Power'",
        wrong="only Power has an exponent",
        advice="remove it, or write `type: Power` beside it",
        holds=lambda f: f.exponent is None or f.type is PolicyFiltrationType.POWER,
    ),
    rule(
        PolicyFiltration,
        "PolicyFiltration.scope",
        field=".scope",
        cel="!has(self.scope) || !has(self.type) || self.type != 'None'",
        wrong="is ignored with type None",
        advice="remove it, or write a type beside it",
        holds=lambda f: f.scope is None or f.type is not PolicyFiltrationType.NONE,
    ),
)
