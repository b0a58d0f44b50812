"""Node affinity, pod affinity and pod anti-affinity of a job's pods, as in a pod."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, TypeVar

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.rule import Rule, cel_text, key_rule, rule
from rljob_api.scalars import DnsLabel, DnsName, Integer, LabelKey, LabelMap, LabelValue

MAX_TERMS = 16
_LABEL_INTEGER = r"^[0-9]{1,18}$"
"""Label values that the scheduler can compare as 64-bit integers."""
Weight = Annotated[Integer, Field(ge=1, le=100)]
Values = Annotated[tuple[LabelValue, ...], Field(max_length=64)]


class NodeOperator(StrEnum):
    """How a node's label is compared with the values. `Gt` and `Lt` compare integers."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GREATER_THAN = "Gt"
    LESS_THAN = "Lt"


class NodeField(StrEnum):
    """Fields of a node that can be compared."""

    NAME = "metadata.name"


class FieldOperator(StrEnum):
    """How a node's name is compared with the value."""

    IN = "In"
    NOT_IN = "NotIn"


class LabelOperator(StrEnum):
    """How the label of a pod or namespace is compared with the values."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class NodeRequirement(WireModel):
    """A condition on one label of a node."""

    key: LabelKey
    operator: NodeOperator
    values: Values = ()


class FieldRequirement(WireModel):
    """A condition on the name of a node."""

    key: NodeField
    operator: FieldOperator
    values: Annotated[tuple[DnsName, ...], Field(min_length=1, max_length=1)]


class NodeTerm(WireModel):
    """Nodes that meet all of these conditions."""

    match_expressions: Annotated[tuple[NodeRequirement, ...], Field(max_length=MAX_TERMS)] = ()
    match_fields: Annotated[tuple[FieldRequirement, ...], Field(max_length=MAX_TERMS)] = ()


class NodeTerms(WireModel):
    """Nodes that match at least one of the terms."""

    node_selector_terms: Annotated[tuple[NodeTerm, ...], Field(min_length=1, max_length=MAX_TERMS)]


class PreferredNodes(WireModel):
    """Nodes that are preferred, with the weight of the preference."""

    weight: Weight
    preference: NodeTerm


class NodeAffinity(WireModel):
    """The nodes on which the pods must or should run, selected by label or name."""

    required_during_scheduling_ignored_during_execution: NodeTerms | None = None
    preferred_during_scheduling_ignored_during_execution: Annotated[
        tuple[PreferredNodes, ...], Field(max_length=MAX_TERMS)
    ] = ()


class LabelRequirement(WireModel):
    """A condition on one label."""

    key: LabelKey
    operator: LabelOperator
    values: Values = ()


class LabelSelector(WireModel):
    """Objects whose labels meet all of these conditions. An empty selector selects all."""

    match_labels: LabelMap = Field(default_factory=dict)
    match_expressions: Annotated[tuple[LabelRequirement, ...], Field(max_length=MAX_TERMS)] = ()


class PodTerm(WireModel):
    """Other pods, selected by label and namespace, and the node label whose value defines one topology domain, for
    example `topology.kubernetes.io/zone`."""

    label_selector: LabelSelector | None = None
    topology_key: LabelKey
    namespaces: Annotated[tuple[DnsLabel, ...], Field(max_length=MAX_TERMS)] = ()
    namespace_selector: LabelSelector | None = None


class PreferredPods(WireModel):
    """A weighted preference for nodes near the selected pods, or away from them in an anti-affinity."""

    weight: Weight
    pod_affinity_term: PodTerm


class PodAffinity(WireModel):
    """Other pods near which the job's pods must or should run; in an anti-affinity, must not or should not run."""

    required_during_scheduling_ignored_during_execution: Annotated[
        tuple[PodTerm, ...], Field(max_length=MAX_TERMS)
    ] = ()
    preferred_during_scheduling_ignored_during_execution: Annotated[
        tuple[PreferredPods, ...], Field(max_length=MAX_TERMS)
    ] = ()


class Affinity(WireModel):
    """Affinity, as in a pod (`kubectl explain pod.spec.affinity`)."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


RequirementT = TypeVar("RequirementT", NodeRequirement, LabelRequirement)


def _values_rule(on: type[RequirementT], cel: str, comparisons: str = "") -> Rule:
    """The rule on the number of values for each operator. `comparisons`: the part of the message about Gt and Lt."""
    return rule(
        on,
        f"{on.__name__}.values",
        field=".values",
        cel=cel,
        wrong=f"In and NotIn need values, {comparisons}Exists and DoesNotExist must have none",
        advice="change values or operator",
        holds=lambda each: _operator_accepts(each.operator, each.values),
    )


def _operator_accepts(operator: str, values: tuple[str, ...]) -> bool:
    if operator in (NodeOperator.IN, NodeOperator.NOT_IN):
        return len(values) > 0
    if operator in (NodeOperator.GREATER_THAN, NodeOperator.LESS_THAN):
        return len(values) == 1 and re.fullmatch(_LABEL_INTEGER, values[0]) is not None
    return not values


AFFINITY_RULES = (
    key_rule(LabelSelector, "match_labels", lambda selector: selector.match_labels),
    _values_rule(
        NodeRequirement,
        "self.operator in ['In', 'NotIn'] ? size(self.values) > 0 : self.operator in ['Gt', 'Lt'] ?"
        f" size(self.values) == 1 && self.values[0].matches({cel_text(_LABEL_INTEGER)}) : size(self.values) == 0",
        "Gt and Lt need one integer, ",
    ),
    _values_rule(LabelRequirement, "(self.operator in ['In', 'NotIn']) == (size(self.values) > 0)"),
)
