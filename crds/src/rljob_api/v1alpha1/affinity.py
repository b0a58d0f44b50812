"""Which nodes and which other pods a job's pods go with, as in a pod. Every type stands many times in the CRD, so its
texts are short."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import DnsLabel, DnsName, Integer, LabelKey, LabelMap, LabelValue

MAX_TERMS = 16
Weight = Annotated[Integer, Field(ge=1, le=100)]
Values = Annotated[tuple[LabelValue, ...], Field(max_length=64)]
LabelKeys = Annotated[tuple[LabelKey, ...], Field(max_length=4)]


class NodeOperator(StrEnum):
    """How values of a node's label compare."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GREATER_THAN = "Gt"
    LESS_THAN = "Lt"


class NodeField(StrEnum):
    """The field of a node."""

    NAME = "metadata.name"


class FieldOperator(StrEnum):
    """How a node's name compares."""

    IN = "In"
    NOT_IN = "NotIn"


class LabelOperator(StrEnum):
    """How values of a label compare."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class NodeRequirement(WireModel):
    """A label of nodes."""

    key: LabelKey
    operator: NodeOperator
    values: Values = ()


class FieldRequirement(WireModel):
    """The name of a node."""

    key: NodeField
    operator: FieldOperator
    values: Annotated[tuple[DnsName, ...], Field(min_length=1, max_length=1)]


class NodeTerm(WireModel):
    """All of these."""

    match_expressions: Annotated[tuple[NodeRequirement, ...], Field(max_length=MAX_TERMS)] = ()
    match_fields: Annotated[tuple[FieldRequirement, ...], Field(max_length=MAX_TERMS)] = ()


class NodeTerms(WireModel):
    """One of the terms."""

    node_selector_terms: Annotated[tuple[NodeTerm, ...], Field(min_length=1, max_length=MAX_TERMS)]


class PreferredNodes(WireModel):
    """A wish."""

    weight: Weight
    preference: NodeTerm


class NodeAffinity(WireModel):
    """By labels of nodes."""

    required_during_scheduling_ignored_during_execution: NodeTerms | None = None
    preferred_during_scheduling_ignored_during_execution: Annotated[
        tuple[PreferredNodes, ...], Field(max_length=MAX_TERMS)
    ] = ()


class LabelRequirement(WireModel):
    """A label."""

    key: LabelKey
    operator: LabelOperator
    values: Values = ()


class LabelSelector(WireModel):
    """All of these; empty selects all."""

    match_labels: LabelMap = Field(default_factory=dict)
    match_expressions: Annotated[tuple[LabelRequirement, ...], Field(max_length=MAX_TERMS)] = ()


class PodTerm(WireModel):
    """Near such pods."""

    label_selector: LabelSelector | None = None
    topology_key: LabelKey
    namespaces: Annotated[tuple[DnsLabel, ...], Field(max_length=MAX_TERMS)] = ()
    namespace_selector: LabelSelector | None = None
    match_label_keys: LabelKeys = ()
    mismatch_label_keys: LabelKeys = ()


class PreferredPods(WireModel):
    """A wish."""

    weight: Weight
    pod_affinity_term: PodTerm


class PodAffinity(WireModel):
    """By labels of pods that run already."""

    required_during_scheduling_ignored_during_execution: Annotated[
        tuple[PodTerm, ...], Field(max_length=MAX_TERMS)
    ] = ()
    preferred_during_scheduling_ignored_during_execution: Annotated[
        tuple[PreferredPods, ...], Field(max_length=MAX_TERMS)
    ] = ()


class Affinity(WireModel):
    """As in a pod."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None
