"""Compares the operator's requests in the API server's audit log with the rights in its chart.

The name of this file sorts last, so that the other tests have run.
"""

from __future__ import annotations

import json
from pathlib import Path

from rljob_testing.cluster.kubectl import Kubectl

Right = tuple[str, str, str]
"""API group, resource (with subresource), verb."""

RARELY_USED: set[Right] = {
    # Only after `ttlSecondsAfterFinished`, which no job of these tests sets.
    ("rljob.dev", "rljobs", "delete"),
    # Only if the policy exists already, or while a dashboard is silent (the operator may have moved).
    ("networking.k8s.io", "networkpolicies", "patch"),
    # Only if a RayCluster that the operator wants to create exists already.
    ("ray.io", "rayclusters", "get"),
}
"""Rights that no job of these tests makes the operator use, each with the reason."""


def test_the_operator_uses_the_rights_of_the_chart(audit_log: Path, operator_rights: set[Right]) -> None:
    used: set[Right] = set()
    rejected: set[Right] = set()
    with audit_log.open() as lines:
        for line in lines:
            event = json.loads(line)
            if not event["user"]["username"].endswith(":rljob-system:rljob-operator") or "objectRef" not in event:
                continue
            reference = event["objectRef"]
            resource = "/".join(filter(None, (reference["resource"], reference.get("subresource", ""))))
            right = (reference.get("apiGroup", ""), resource, event["verb"])
            (rejected if event.get("responseStatus", {}).get("code") == 403 else used).add(right)
    assert rejected == set()
    assert used | RARELY_USED == operator_rights


def test_namespaces_are_restricted(kubectl: Kubectl) -> None:
    """Both namespaces enforce the Pod Security level `restricted`, so all pods of jobs and of the operator met it."""
    for namespace in (kubectl.namespace, "rljob-system"):
        found = json.loads(kubectl("get", "namespace", namespace, "-o", "json"))
        assert found["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
