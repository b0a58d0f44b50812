"""Who may talk to the Ray cluster of an attempt: the token that Ray asks for, and the network policy.

The token is derived from the operator's key, so that the operator knows it again without reading a secret: making
secrets is all that it may do with them. The policy lets in the attempt's own pods and, to Ray's dashboard, the
operator. Outgoing traffic is open, for models, datasets and trackers.
"""

from __future__ import annotations

import hashlib
import hmac

from pydantic import JsonValue

from rljob_api.constants import DASHBOARD_PORT, LABEL_ATTEMPT, LABEL_JOB_UID
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.manifests.naming import cluster_name, companion_name
from rljob_operator.manifests.objects import JobIdentity, Manifest, metadata
from rljob_operator.raw_json import JsonObject, text_at

KEY_ID_LENGTH = 8
TOKEN_KEY = "auth_token"
"""Key within the Secret, as KubeRay wants it."""


def derived_token(key: bytes, job: JobIdentity, cluster: str) -> str:
    """64 hexadecimal digits, of this job and this cluster only."""
    return hmac.new(key, f"{job.uid}/{cluster}".encode(), hashlib.sha256).hexdigest()


def key_id(key: bytes) -> str:
    """Names a key without telling it; what `constants.ANNOTATION_TOKEN_KEY` holds."""
    return hashlib.sha256(key).hexdigest()[:KEY_ID_LENGTH]


def token_secret(job: JobIdentity, cluster: str, token: str) -> Manifest:
    """The Secret that the cluster's `authOptions.secretName` names."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, companion_name(cluster, job.uid)),
        "type": "Opaque",
        "immutable": True,
        "stringData": {TOKEN_KEY: token},
    }


def asks_for_token(ray_cluster: JsonObject) -> bool:
    """Whether a RayCluster as the API server has it still makes Ray ask for the token of a Secret."""
    options = ("spec", "authOptions")
    return text_at(ray_cluster, *options, "mode") == "token" and text_at(ray_cluster, *options, "secretName") != ""


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
