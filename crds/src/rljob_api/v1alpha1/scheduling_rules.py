"""Rules on labels, annotations and affinity, as the API server judges them when it makes the pod."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rljob_api.constants import RAY_CONTAINER
from rljob_api.scalars import ANNOTATION_KEY, MAX_DOMAIN, QUALIFIED_NAME
from rljob_api.v1alpha1.affinity import LabelRequirement, LabelSelector, NodeOperator, NodeRequirement, PodTerm
from rljob_api.v1alpha1.pools import PodOverlay
from rljob_api.v1alpha1.rule import ContractT, Path, Rule, cel_text, rule, wire_name

APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
_SECCOMP = ("seccomp.security.alpha.kubernetes.io/", "container.seccomp.security.alpha.kubernetes.io/")
_OTHERS = (
    "controller.kubernetes.io/pod-deletion-cost",
    "kubernetes.io/config.mirror",
    "scheduler.alpha.kubernetes.io/tolerations",
)
"""Annotations that the API server accepts only with some values. They have no effect on the pods of a job, as those for
seccomp have none since Kubernetes 1.27; so all are refused."""
_PROFILES = ("", "runtime/default", "unconfined")
_OWN_PROFILE = "localhost/"
_LABEL_INTEGER = r"^[0-9]{1,18}$"
"""A value of a label that the scheduler can compare as an integer of 64 bits."""


def _key_rule(
    on: type[ContractT], field: str, read: Callable[[ContractT], Mapping[str, str]], pattern: str = QUALIFIED_NAME
) -> Rule:
    """Each key of a map is a name, with or without a domain. Only a rule can look at keys in a CRD."""
    wire = wire_name(on, field)

    def places(value: ContractT) -> list[Path]:
        return [(key,) for key in read(value) if re.fullmatch(pattern, key) is None or key.find("/") > MAX_DOMAIN]

    return rule(
        on,
        f"{on.__name__}.{wire}Keys",
        field=f".{wire}",
        cel=(
            f"!has(self.{wire}) || self.{wire}.all(k, k.matches({cel_text(pattern)}) && k.indexOf('/') <= {MAX_DOMAIN})"
        ),
        wrong="has an invalid key",
        advice="write such as team or example.com/team, at most 63 characters after the domain",
        holds=lambda value: not places(value),
        places=places,
    )


def _operator_takes(operator: str, values: tuple[str, ...]) -> bool:
    if operator in (NodeOperator.IN, NodeOperator.NOT_IN):
        return len(values) > 0
    if operator in (NodeOperator.GREATER_THAN, NodeOperator.LESS_THAN):
        return len(values) == 1 and re.fullmatch(_LABEL_INTEGER, values[0]) is not None
    return not values


def _reads_own_keys(term: PodTerm) -> bool:
    selector, keys = term.label_selector, set(term.match_label_keys)
    if selector is None:
        return not keys and not term.mismatch_label_keys
    selected = {*selector.match_labels, *(each.key for each in selector.match_expressions)}
    return keys.isdisjoint(selected) and keys.isdisjoint(term.mismatch_label_keys)


def _not_taken(overlay: PodOverlay) -> list[Path]:
    return [(key,) for key in overlay.annotations if key.startswith(_SECCOMP) or key in _OTHERS]


def _bad_profiles(overlay: PodOverlay) -> list[Path]:
    """Profiles of AppArmor that the API server would refuse in pods of ours."""
    return [
        (key,)
        for key, value in overlay.annotations.items()
        if key.startswith(APPARMOR)
        and (key != f"{APPARMOR}{RAY_CONTAINER}" or not (value in _PROFILES or value.startswith(_OWN_PROFILE)))
    ]


SCHEDULING_RULES = (
    _key_rule(PodOverlay, "labels", lambda overlay: overlay.labels),
    _key_rule(PodOverlay, "annotations", lambda overlay: overlay.annotations, ANNOTATION_KEY),
    _key_rule(PodOverlay, "node_selector", lambda overlay: overlay.node_selector),
    rule(
        PodOverlay,
        "PodOverlay.annotationsTaken",
        field=".annotations",
        cel=(
            f"!has(self.annotations) || self.annotations.all(k, !(k in {list(_OTHERS)})"
            + "".join(f" && !k.startsWith('{prefix}')" for prefix in _SECCOMP)
            + ")"
        ),
        wrong="RLJob does not take annotations for seccomp, mirror pods, deletion costs and alpha tolerations",
        advice="remove it",
        holds=lambda overlay: not _not_taken(overlay),
        places=_not_taken,
    ),
    rule(
        PodOverlay,
        "PodOverlay.appArmor",
        field=".annotations",
        cel=(
            f"!has(self.annotations) || self.annotations.all(k, !k.startsWith('{APPARMOR}') ||"
            f" k == '{APPARMOR}{RAY_CONTAINER}' && (self.annotations[k] in {list(_PROFILES)} ||"
            f" self.annotations[k].startsWith('{_OWN_PROFILE}')))"
        ),
        wrong=f"an AppArmor profile can only be one of the container {RAY_CONTAINER}",
        advice=f"write {APPARMOR}{RAY_CONTAINER}: runtime/default, unconfined, or localhost/<profile>",
        holds=lambda overlay: not _bad_profiles(overlay),
        places=_bad_profiles,
    ),
    _key_rule(LabelSelector, "match_labels", lambda selector: selector.match_labels),
    rule(
        NodeRequirement,
        "NodeRequirement.values",
        field=".values",
        cel=(
            "self.operator in ['In', 'NotIn'] ? size(self.values) > 0 : self.operator in ['Gt', 'Lt'] ?"
            f" size(self.values) == 1 && self.values[0].matches({cel_text(_LABEL_INTEGER)}) : size(self.values) == 0"
        ),
        wrong="In and NotIn need values, Gt and Lt need one integer, Exists and DoesNotExist take none",
        advice="correct the values or the operator",
        holds=lambda each: _operator_takes(each.operator, each.values),
    ),
    rule(
        LabelRequirement,
        "LabelRequirement.values",
        field=".values",
        cel="(self.operator in ['In', 'NotIn']) == (size(self.values) > 0)",
        wrong="In and NotIn need values, Exists and DoesNotExist take none",
        advice="correct the values or the operator",
        holds=lambda each: _operator_takes(each.operator, each.values),
    ),
    rule(
        PodTerm,
        "PodTerm.matchLabelKeys",
        field=".matchLabelKeys",
        cel=(
            "has(self.labelSelector) ? self.matchLabelKeys.all(k, !(k in self.mismatchLabelKeys) && "
            "!(k in self.labelSelector.matchLabels) && !self.labelSelector.matchExpressions.exists(e, e.key == k))"
            " : size(self.matchLabelKeys) + size(self.mismatchLabelKeys) == 0"
        ),
        wrong="keys need a labelSelector that does not use them, and cannot also be in mismatchLabelKeys",
        advice="remove the key, or write a labelSelector",
        holds=_reads_own_keys,
    ),
)
