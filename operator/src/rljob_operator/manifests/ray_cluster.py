"""Builds the RayCluster of an attempt: a head without GPUs, and for each pool a worker group, as KubeRay calls it.

The operator never changes a RayCluster that exists.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType

from rljob_api.constants import ANNOTATION_TOKEN_KEY, POOL_RESOURCE_PREFIX
from rljob_api.quantities import number_of
from rljob_api.v1alpha1.pools import Pool
from rljob_api.v1alpha1.resources import Resources
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.manifests.naming import cluster_name, secret_name
from rljob_operator.manifests.ownership import JobIdentity, Manifest, labels, metadata
from rljob_operator.manifests.pod_template import PodMaker

API_VERSION = "ray.io/v1"
KIND = "RayCluster"
GANG_LABEL = "ray.io/gang-scheduling-enabled"
"""With it, a KubeRay that has a batch scheduler asks this scheduler to start all pods of the cluster or none."""


def ray_cluster(
    job: JobIdentity,
    spec: RLJobSpec,
    attempt: int,
    defaults: Defaults,
    token_key_id: str,
    queue_labels: Mapping[str, str] = MappingProxyType({}),
) -> Manifest:
    """The manifest of the RayCluster. Raises DocumentError if the spec is too large for the environment variable in
    which the trainer gets it.

    Args:
        token_key_id: Id of the key from which the cluster's token is derived.
        queue_labels: Labels for Kueue. With them, the cluster is created suspended, and Kueue resumes it when its queue
            admits it.
    """
    name = cluster_name(job.name, attempt)
    pods = PodMaker(job, spec, attempt, defaults)
    annotations: Manifest = {
        ANNOTATION_TOKEN_KEY: token_key_id,
        # A restarted head would not know the Ray job, and the operator would wait for a trainer that no longer exists.
        "ray.io/disable-provisioned-head-restart": "true",
    }
    of_job = metadata(job, name, attempt)
    gang: Manifest = {GANG_LABEL: "true"} if spec.scheduling.gang else {}
    cluster_labels: Manifest = {**spec.scheduling.labels, **gang, **queue_labels, **labels(job, attempt)}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {**of_job, "labels": cluster_labels, "annotations": annotations},
        "spec": {
            **({"suspend": True} if queue_labels else {}),
            "rayVersion": spec.ray_version or defaults.ray_version,
            "authOptions": {"mode": "token", "secretName": secret_name(name, job.uid, token_key_id)},
            "headGroupSpec": {
                # To Ray, the head has no CPUs: only the trainer's controller runs there, and workers run in the pools.
                "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0", "num-gpus": "0"},
                "template": pods.head(),
            },
            "workerGroupSpecs": [_worker_group(pool, pods.worker(pool)) for pool in spec.pools],
        },
    }


def _worker_group(pool: Pool, template: Manifest) -> Manifest:
    """KubeRay's worker group of a pool: equal worker pods. (To the trainer, a worker group is something else.)"""
    return {
        "groupName": pool.name,
        "replicas": pool.nodes,
        "minReplicas": pool.nodes,
        "maxReplicas": pool.nodes,
        "rayStartParams": {
            "num-cpus": str(_num_cpus(pool)),
            "num-gpus": str(pool.gpus_per_node),
            "resources": _shell_quoted({f"{POOL_RESOURCE_PREFIX}{pool.name}": pool.gpus_per_node}),
        },
        "template": template,
    }


def _shell_quoted(resources: Mapping[str, int]) -> str:
    """The resources as JSON, quoted for a shell: KubeRay copies start parameters into a shell command unchanged."""
    text = json.dumps(resources, separators=(",", ":")).replace('"', '\\"')
    return f'"{text}"'


def _num_cpus(pool: Pool) -> int:
    """The number of CPUs that a worker pod has for Ray: at least one more than GPUs. The trainer reserves one CPU for
    each GPU; one more stays free for other tasks of Ray."""
    return max(pool.gpus_per_node + 1, _whole_cpus(pool.resources))


def _whole_cpus(resources: Resources) -> int:
    """CPUs of the limit, or of the request if there is no limit, rounded up; 0 if there is neither."""
    return math.ceil(number_of(resources.limits.get("cpu") or resources.requests.get("cpu") or "0"))
