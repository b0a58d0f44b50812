"""The token of a job's Ray cluster.

It is derived from the operator's key, so that the operator knows it again without reading a secret: making secrets is
all that it may do with them.
"""

from __future__ import annotations

import hashlib
import hmac

from rljob_operator.manifests.naming import companion_name
from rljob_operator.manifests.objects import JobIdentity, Manifest, metadata

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
