"""Builds the pod templates of a job's Ray cluster.

KubeRay uses the first container for Ray, generates its command and probes, and copies its security context and
variables into the init container that it adds to workers. The pods comply with the restricted Pod Security Standard.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import JsonValue

from rljob_api.constants import DRIVER_LOG_CONTAINER, LABEL_POOL, RAY_CONTAINER
from rljob_api.v1alpha1.pools import PodOverlay, Pool
from rljob_api.v1alpha1.resources import Resources
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.manifests.ownership import JobIdentity, Manifest, labels
from rljob_operator.manifests.pod_environment import (
    driver_log_environment,
    head_environment,
    wire,
    without_defaults,
    worker_environment,
)
from rljob_operator.manifests.volumes import (
    MountedVolume,
    mounts,
    pod_volumes,
    ray_volume,
    shared_memory_volume,
    sources,
    storage_volume,
)

STOP_DRIVER = "rljob_trainer.pod.stop_driver"
"""Module that the stop hook of the head pod runs."""
WAIT_FOR_WORKER_EXIT = "rljob_trainer.pod.wait_for_worker_exit"
"""Module that the stop hook of worker pods runs."""
DRIVER_LOG = "rljob_trainer.pod.driver_log"
"""Module that the container with the driver's log runs."""


@dataclass(frozen=True)
class PodMaker:
    """Builds the pod templates of one attempt."""

    job: JobIdentity
    spec: RLJobSpec
    attempt: int
    defaults: Defaults

    def head(self) -> Manifest:
        """Template of the head pod. Raises DocumentError if the spec is too large for the environment variable in which
        the trainer gets it."""
        volumes = [*pod_volumes(self.job, self.spec), ray_volume()]
        resources = _resources(self.spec.head.resources)
        environment = head_environment(self.job, self.spec)
        ray = self._ray_container(environment, resources, volumes, STOP_DRIVER)
        return self._template(self.spec.head.template, {}, [ray, self._driver_log_container()], volumes)

    def worker(self, pool: Pool) -> Manifest:
        """Template of a pool's pods."""
        volumes = [*pod_volumes(self.job, self.spec), shared_memory_volume(pool.shared_memory)]
        resources = _resources(pool.resources, {pool.gpu_resource: str(pool.gpus_per_node)})
        container = self._ray_container(worker_environment(self.spec), resources, volumes, WAIT_FOR_WORKER_EXIT)
        return self._template(pool.template, {LABEL_POOL: pool.name}, [container], volumes)

    def _template(
        self, overlay: PodOverlay, pool_label: Manifest, containers: list[JsonValue], volumes: list[MountedVolume]
    ) -> Manifest:
        """A pod template. The fields of the job (`overlay`) come first, so that they cannot override the operator's
        fields. `pool_label`: empty for the head pod."""
        return {
            "metadata": {
                "labels": {
                    **overlay.labels,
                    **self.spec.scheduling.labels,
                    **labels(self.job, self.attempt),
                    **pool_label,
                },
                "annotations": {**overlay.annotations},
            },
            "spec": {
                **_scheduling(overlay),
                **self._service_account(),
                # Webhooks of clouds add tokens of their own kind to the pods of a ServiceAccount.
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                # Otherwise the shells that KubeRay starts would be process 1 and ignore SIGTERM: each pod would use its
                # whole grace period to terminate.
                "shareProcessNamespace": True,
                "terminationGracePeriodSeconds": self.spec.run_policy.grace_period_seconds,
                "securityContext": {
                    "runAsNonRoot": True,
                    **self._user("runAsUser", "fsGroup"),
                    # Otherwise the kubelet changes the owner of every file of a large volume before each start.
                    "fsGroupChangePolicy": "OnRootMismatch",
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "imagePullSecrets": [{"name": secret.name} for secret in self.spec.image_pull_secrets],
                "containers": containers,
                "volumes": sources(volumes),
            },
        }

    def _ray_container(
        self, environment: list[JsonValue], resources: Manifest, volumes: list[MountedVolume], stop_hook: str
    ) -> Manifest:
        return {
            **self._container(RAY_CONTAINER),
            "env": environment,
            "envFrom": [wire(source) for source in self.spec.env_from],
            "resources": resources,
            "lifecycle": {"preStop": {"exec": {"command": ["python", "-m", stop_hook]}}},
            "volumeMounts": mounts(volumes),
        }

    def _driver_log_container(self) -> Manifest:
        volumes = [storage_volume(self.job, self.spec), ray_volume(read_only=True)]
        return {
            **self._container(DRIVER_LOG_CONTAINER),
            "command": ["python", "-m", DRIVER_LOG],
            "env": driver_log_environment(self.spec),
            "resources": {
                "requests": {"cpu": "10m", "memory": "64Mi"},
                "limits": {"cpu": "500m", "memory": "256Mi"},
            },
            "volumeMounts": mounts(volumes),
        }

    def _service_account(self) -> Manifest:
        name = self.spec.service_account_name
        return {} if name is None else {"serviceAccountName": name}

    def _user(self, *fields: str) -> Manifest:
        """These fields of a security context, with the user's id; empty if the cluster chooses the user."""
        user = self.defaults.run_as_user
        return {} if user is None else dict.fromkeys(fields, user)

    def _container(self, name: str) -> Manifest:
        """The fields that all containers share."""
        image = self.spec.image or self.defaults.trainer_image
        assert image is not None, "job_checks rejects a job without an image"
        return {
            "name": name,
            "image": image,
            "imagePullPolicy": self.defaults.image_pull_policy,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "runAsNonRoot": True,
                **self._user("runAsUser"),
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        }


def _resources(specified: Resources, gpus: dict[str, str] | None = None) -> Manifest:
    """Requests and limits as specified in the job, and the GPUs in both. `gpus`: such as `{"nvidia.com/gpu": "8"}`."""
    return {"requests": {**specified.requests, **(gpus or {})}, "limits": {**specified.limits, **(gpus or {})}}


def _scheduling(overlay: PodOverlay) -> Manifest:
    """The job's scheduling fields for its pods, without unset ones."""
    fields: Manifest = {
        "nodeSelector": {**overlay.node_selector},
        "tolerations": [wire(toleration) for toleration in overlay.tolerations],
        "affinity": None if overlay.affinity is None else without_defaults(overlay.affinity),
        "priorityClassName": overlay.priority_class_name,
        "runtimeClassName": overlay.runtime_class_name,
        "schedulerName": overlay.scheduler_name,
    }
    return {name: value for name, value in fields.items() if value}
