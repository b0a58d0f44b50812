"""Rules on labels, annotations and affinity, as the API server judges them when it makes the pod."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rljob_api.constants import RAY_CONTAINER
from rljob_api.scalars import ANNOTATION_KEY, MAX_DOMAIN, QUALIFIED_NAME
from rljob_api.v1alpha1.affinity import LabelRequirement, LabelSelector, NodeOperator, NodeRequirement, PodTerm
from rljob_api.v1alpha1.pools import PodOverlay
from rljob_api.v1alpha1.rule import ContractT, Path, Rule, cel_text, rule, wire_name

_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
_SECCOMP = ("seccomp.security.alpha.kubernetes.io/", "container.seccomp.security.alpha.kubernetes.io/")
_OTHERS = (
    "controller.kubernetes.io/pod-deletion-cost",
    "kubernetes.io/config.mirror",
    "scheduler.alpha.kubernetes.io/tolerations",
)
_PROFILES = ("", "runtime/default", "unconfined")
_OWN_PROFILE = "localhost/"


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
        advice="use keys such as team or example.com/team: at most 63 letters, digits, '-', '_', '.' after the domain",
        holds=lambda value: not places(value),
        places=places,
    )


def _operator_needs(operator: str, num_values: int) -> bool:
    if operator in (NodeOperator.IN, NodeOperator.NOT_IN):
        return num_values > 0
    return num_values == (1 if operator in (NodeOperator.GREATER_THAN, NodeOperator.LESS_THAN) else 0)


def _reads_own_keys(term: PodTerm) -> bool:
    selector, keys = term.label_selector, set(term.match_label_keys)
    if selector is None:
        return not keys and not term.mismatch_label_keys
    selected = {*selector.match_labels, *(each.key for each in selector.match_expressions)}
    return keys.isdisjoint(selected) and keys.isdisjoint(term.mismatch_label_keys)


def _is_usable(key: str, value: str) -> bool:
    """Whether the API server, which reads some annotations, takes this one in pods of ours."""
    if key.startswith(_APPARMOR):
        is_profile = value in _PROFILES or value.startswith(_OWN_PROFILE)
        return key == f"{_APPARMOR}{RAY_CONTAINER}" and is_profile
    return not key.startswith(_SECCOMP) and key not in _OTHERS


def _unusable(overlay: PodOverlay) -> list[Path]:
    return [(key,) for key, value in overlay.annotations.items() if not _is_usable(key, value)]


SCHEDULING_RULES = (
    _key_rule(PodOverlay, "labels", lambda overlay: overlay.labels),
    _key_rule(PodOverlay, "annotations", lambda overlay: overlay.annotations, ANNOTATION_KEY),
    _key_rule(PodOverlay, "node_selector", lambda overlay: overlay.node_selector),
    rule(
        PodOverlay,
        "PodOverlay.annotationsRead",
        field=".annotations",
        cel=(
            f"!has(self.annotations) || self.annotations.all(k, !(k in {list(_OTHERS)})"
            + "".join(f" && !k.startsWith('{prefix}')" for prefix in _SECCOMP)
            + f" && (!k.startsWith('{_APPARMOR}') || k == '{_APPARMOR}{RAY_CONTAINER}' && (self.annotations[k] in"
            f" {list(_PROFILES)} || self.annotations[k].startsWith('{_OWN_PROFILE}'))))"
        ),
        wrong="has an annotation for which the API server would refuse the pod",
        advice=f"remove it; for AppArmor write {_APPARMOR}{RAY_CONTAINER}: runtime/default, or localhost/<profile>",
        holds=lambda overlay: not _unusable(overlay),
        places=_unusable,
    ),
    _key_rule(LabelSelector, "match_labels", lambda selector: selector.match_labels),
    rule(
        NodeRequirement,
        "NodeRequirement.values",
        field=".values",
        cel=(
            "self.operator in ['In', 'NotIn'] ? size(self.values) > 0 : "
            "size(self.values) == (self.operator in ['Gt', 'Lt'] ? 1 : 0)"
        ),
        wrong="In and NotIn need values, Gt and Lt need one, Exists and DoesNotExist take none",
        advice="correct the values or the operator",
        holds=lambda each: _operator_needs(each.operator, len(each.values)),
    ),
    rule(
        LabelRequirement,
        "LabelRequirement.values",
        field=".values",
        cel="(self.operator in ['In', 'NotIn']) == (size(self.values) > 0)",
        wrong="In and NotIn need values, Exists and DoesNotExist take none",
        advice="correct the values or the operator",
        holds=lambda each: _operator_needs(each.operator, len(each.values)),
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
