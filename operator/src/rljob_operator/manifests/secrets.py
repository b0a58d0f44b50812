"""The token of a job's Ray cluster.

It is derived from the operator's key, so that the operator knows it again without reading a secret: making secrets is
all that it may do with them.
"""

from __future__ import annotations

import hashlib
import hmac

from rljob_operator.manifests.objects import JobIdentity, Manifest, metadata

KEY_ID_LENGTH = 8


def derived_token(key: bytes, job: JobIdentity, cluster: str) -> str:
    """64 hexadecimal digits, of this job and this cluster only."""
    return hmac.new(key, f"{job.uid}/{cluster}".encode(), hashlib.sha256).hexdigest()


def key_id(key: bytes) -> str:
    """Names a key without telling it; what `contract.ANNOTATION_TOKEN_KEY` holds."""
    return hashlib.sha256(key).hexdigest()[:KEY_ID_LENGTH]


def token_secret(job: JobIdentity, cluster: str, token: str) -> Manifest:
    """The Secret in which KubeRay looks for the cluster's token. If it is there first, KubeRay takes it as it is."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, cluster),
        "type": "Opaque",
        "immutable": True,
        "stringData": {"auth_token": token},
    }
