"""Who may talk to the pods of an attempt: they themselves, and the operator to Ray's dashboard. Outgoing traffic is
open, for models, datasets and trackers."""

from __future__ import annotations

from pydantic import JsonValue

from rljob_api.constants import DASHBOARD_PORT, LABEL_ATTEMPT, LABEL_JOB_UID
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.manifests.naming import cluster_name, companion_name
from rljob_operator.manifests.objects import JobIdentity, Manifest, metadata


def network_policy(job: JobIdentity, attempt: int, defaults: Defaults) -> Manifest:
    """The NetworkPolicy of an attempt."""
    name = companion_name(cluster_name(job.name, attempt), job.uid)
    operator_labels: dict[str, JsonValue] = dict(defaults.operator_pod_labels)
    from_operator: Manifest = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": defaults.operator_namespace}},
        "podSelector": {"matchLabels": operator_labels},
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, name, attempt),
        "spec": {
            "podSelector": _pods(job, attempt),
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": _pods(job, attempt)}]},
                {"from": [from_operator], "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}]},
            ],
        },
    }


def _pods(job: JobIdentity, attempt: int) -> Manifest:
    return {"matchLabels": {LABEL_JOB_UID: job.uid, LABEL_ATTEMPT: str(attempt)}}
