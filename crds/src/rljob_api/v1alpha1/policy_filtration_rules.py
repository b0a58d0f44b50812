"""Rules on policy filtration."""

from __future__ import annotations

from rljob_api.rule import rule
from rljob_api.v1alpha1.policy_filtration import FiltrationScope, PolicyFiltration, PolicyFiltrationType
from rljob_api.v1alpha1.training import Training


def _draws_among_several(training: Training) -> bool:
    return training.algorithm.policy_filtration.scope is not FiltrationScope.GROUP or training.rollout.group_size >= 2


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
)
