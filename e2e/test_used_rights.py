"""What the operator did, as the API server's audit log saw it, against what its chart allows. Its name sorts
last, so that the other tests have run."""

from __future__ import annotations

import json
from pathlib import Path

from rljob_testing.cluster.kubectl import Kubectl

Right = tuple[str, str, str]
"""API group, resource (with subresource), verb."""

RARELY_USED: set[Right] = {
    # Only after `ttlSecondsAfterFinished`, which no job of the suite has.
    ("rljob.dev", "rljobs", "delete"),
    # Only of jobs whose operator was moved to another namespace while they ran.
    ("networking.k8s.io", "networkpolicies", "patch"),
    # Only where a RayCluster that is to be made is there already.
    ("ray.io", "rayclusters", "get"),
}
"""Rights that the jobs of this suite do not bring the operator to use, each with its reason."""


def test_the_verbs_used_are_those_of_the_chart(audit_log: Path, operator_rights: set[Right]) -> None:
    used: set[Right] = set()
    refused: set[Right] = set()
    with audit_log.open() as lines:
        for line in lines:
            event = json.loads(line)
            if not event["user"]["username"].endswith(":rljob-system:rljob-operator") or "objectRef" not in event:
                continue
            reference = event["objectRef"]
            resource = "/".join(filter(None, (reference["resource"], reference.get("subresource", ""))))
            right = (reference.get("apiGroup", ""), resource, event["verb"])
            (refused if event.get("responseStatus", {}).get("code") == 403 else used).add(right)
    assert refused == set()
    assert used | RARELY_USED == operator_rights


def test_namespaces_are_restricted(kubectl: Kubectl) -> None:
    """Pods of jobs and of the operator were admitted by Pod Security at its strictest level."""
    for namespace in (kubectl.namespace, "rljob-system"):
        found = json.loads(kubectl("get", "namespace", namespace, "-o", "json"))
        assert found["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
