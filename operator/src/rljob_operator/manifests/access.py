"""Controls access to the Ray cluster of an attempt: Ray's token and the network policy.

The token is derived from the operator's key, so the operator needs no permission to read Secrets; it may only create
them. The policy allows connections to the attempt's pods only from each other and, on the port of Ray's dashboard, from
the operator. Outgoing connections are not restricted, because the pods load models and datasets and report to trackers.
The installer can add rules, and restrict outgoing connections (`settings.JobNetworkPolicy`).
"""

from __future__ import annotations

import hashlib
import hmac

from pydantic import JsonValue

from rljob_api.constants import DASHBOARD_PORT, LABEL_ATTEMPT, LABEL_JOB_UID
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.manifests.naming import cluster_name, companion_name, secret_name
from rljob_operator.manifests.ownership import JobIdentity, Manifest, metadata
from rljob_operator.raw_json import JsonObject, text_at

KEY_ID_LENGTH = 8
_DNS: list[JsonValue] = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
TOKEN_ENTRY = "auth_token"
"""Name of the Secret's entry with the token, as KubeRay requires it."""


def derived_token(key: bytes, job: JobIdentity, cluster: str) -> str:
    """The token of one cluster of one job: 64 hexadecimal digits."""
    return hmac.new(key, f"{job.uid}/{cluster}".encode(), hashlib.sha256).hexdigest()


def key_id(key: bytes) -> str:
    """A short id of a key that does not reveal it: the value of the annotation `constants.ANNOTATION_TOKEN_KEY`."""
    return hashlib.sha256(key).hexdigest()[:KEY_ID_LENGTH]


def token_secret(job: JobIdentity, cluster: str, key: bytes) -> Manifest:
    """The Secret with the cluster's token, to which `authOptions.secretName` refers."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, secret_name(cluster, job.uid, key_id(key))),
        "type": "Opaque",
        "immutable": True,
        "stringData": {TOKEN_ENTRY: derived_token(key, job, cluster)},
    }


def asks_for_token(ray_cluster: JsonObject) -> bool:
    """Whether a stored RayCluster turns on Ray's token authentication; a KubeRay that is too old drops the field."""
    options = ("spec", "authOptions")
    return text_at(ray_cluster, *options, "mode") == "token" and text_at(ray_cluster, *options, "secretName") != ""


def network_policy(job: JobIdentity, attempt: int, defaults: Defaults) -> Manifest:
    """The NetworkPolicy of an attempt."""
    added = defaults.network_policy
    own_pods: Manifest = {"podSelector": _pod_selector(job, attempt)}
    name = companion_name(cluster_name(job.name, attempt), job.uid)
    operator_labels: dict[str, JsonValue] = dict(defaults.operator_pod_labels)
    from_operator: Manifest = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": defaults.operator_namespace}},
        "podSelector": {"matchLabels": operator_labels},
    }
    ingress: list[JsonValue] = [
        {"from": [own_pods]},
        {"from": [from_operator], "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}]},
    ]
    if added.metrics_from:
        metrics: Manifest = {"protocol": "TCP", "port": added.metrics_port}
        ingress.append({"from": list(added.metrics_from), "ports": [metrics]})
    dns: Manifest = {**({"to": list(added.dns_to)} if added.dns_to else {}), "ports": _DNS}
    egress: Manifest = {"egress": [{"to": [own_pods]}, dns, *added.egress]} if added.restrict_egress else {}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, name, attempt),
        "spec": {
            "podSelector": _pod_selector(job, attempt),
            "policyTypes": ["Ingress", "Egress"] if added.restrict_egress else ["Ingress"],
            "ingress": [*ingress, *added.ingress],
            **egress,
        },
    }


def _pod_selector(job: JobIdentity, attempt: int) -> Manifest:
    return {"matchLabels": {LABEL_JOB_UID: job.uid, LABEL_ATTEMPT: str(attempt)}}
