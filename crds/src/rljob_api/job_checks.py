"""Checks of a valid job beyond the rules of the contract: requirements that only a cluster has, and warnings about
probable mistakes. The API server does not reject such mistakes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from rljob_api.constants import MIN_RAY_VERSION, RAY_CONTAINER
from rljob_api.contract_documents import TrainerJob, dump_job
from rljob_api.elastic import can_use_fewer_nodes
from rljob_api.errors import DocumentError
from rljob_api.quantities import number_of
from rljob_api.rule import Path, Violation, wire_name
from rljob_api.scheduler_labels import scheduler_violations
from rljob_api.training_checks import training_warnings
from rljob_api.v1alpha1.affinity import Affinity, NodeTerm, PodTerm
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.pools import APPARMOR, KUEUE_PREFIX, PRIORITY_CLASS_LABEL, QUEUE_LABEL, Head, PodOverlay, Pool
from rljob_api.v1alpha1.spec import RLJobSpec

STORAGE_RULE = "RLJobSpec.storageOnCluster"
IMAGE_RULE = "RLJobSpec.imageOnCluster"
RAY_VERSION_RULE = "RLJobSpec.rayVersionOnCluster"
ELASTIC_RULE = "RLJobSpec.elasticInQueue"
URL_PASSWORD_RULE = "EnvVar.passwordInUrl"
SERVICE_ACCOUNT_RULE = "RLJobSpec.serviceAccountOnCluster"
_URL_WITH_PASSWORD = r"(?i)\b[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@"
_VERSION = r"\d+\.\d+\.\d+"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_BYTE_RESOURCES = ("memory", "ephemeral-storage")
_DEPRECATED_LABELS = {
    "beta.kubernetes.io/arch": "kubernetes.io/arch",
    "beta.kubernetes.io/instance-type": "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/os": "kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region": "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone": "topology.kubernetes.io/zone",
}
"""Deprecated node labels and their replacements."""
_IGNORED_ANNOTATIONS = {
    "scheduler.alpha.kubernetes.io/critical-pod": "remove it, and set priorityClassName instead",
    "security.alpha.kubernetes.io/sysctls": "remove it",
    "security.alpha.kubernetes.io/unsafe-sysctls": "remove it",
}
"""Annotations that Kubernetes no longer reads, with the advice of the warning."""


def cluster_violations(
    spec: RLJobSpec,
    labels: Mapping[str, str] = MappingProxyType({}),
    *,
    has_default_image: bool,
    service_account_names: Collection[str] | None = None,
    allowed_label_prefixes: tuple[str, ...] | None = None,
) -> tuple[Violation, ...]:
    """What prevents a valid job from running on a Kubernetes cluster.

    Args:
        labels: The labels of the job.
        has_default_image: Whether the operator's installation has a default trainer image.
        service_account_names: The ServiceAccounts that the installation allows jobs to use; None if this is unknown.
        allowed_label_prefixes: Prefixes of the labels of batch schedulers that the installation allows; None if this is
            unknown.
    """
    found = []
    if spec.checkpoint.storage is None:
        found.append(
            Violation(
                rule=STORAGE_RULE,
                path=("spec", "checkpoint", "storage"),
                wrong="is required on a Kubernetes cluster, because the pods need shared storage",
                advice=(
                    "set it to a ReadWriteMany PersistentVolumeClaim: storage: {persistentVolumeClaim: <name>}, or to a"
                    " bucket: storage: {s3: {bucket: <name>}}"
                ),
            )
        )
    if spec.image is None and not has_default_image:
        found.append(
            Violation(
                rule=IMAGE_RULE,
                path=("spec", "image"),
                wrong="is required, because this operator has no default trainer image",
                advice="set it to a trainer image",
            )
        )
    if spec.ray_version is not None and not is_ray_new_enough(spec.ray_version):
        found.append(
            Violation(
                rule=RAY_VERSION_RULE,
                path=("spec", "rayVersion"),
                wrong=(
                    f"must be at least {MIN_RAY_VERSION} on a Kubernetes cluster, because older versions accept"
                    " requests without a token"
                ),
                advice="use an image with a newer Ray, and set this field to its version",
                seen=spec.ray_version,
            )
        )
    return (
        *found,
        *_service_account_violations(spec.service_account_name, service_account_names),
        *_queue_violations(spec, labels),
        *scheduler_violations(spec, allowed_label_prefixes),
    )


def is_ray_new_enough(version: str) -> bool:
    """Whether a version is at least `MIN_RAY_VERSION`; False if it does not have the form 2.60.0."""
    is_version = re.fullmatch(_VERSION, version, flags=re.ASCII) is not None
    return is_version and _numbers(version) >= _numbers(MIN_RAY_VERSION)


def job_warnings(job: RLJob) -> tuple[Violation, ...]:
    """All warnings about a job, with their paths."""
    pods: list[tuple[Path, Head | Pool]] = [(("spec", "head"), job.spec.head)]
    pods += [(("spec", "pools", index), pool) for index, pool in enumerate(job.spec.pools)]
    return (
        *_kueue_warnings("labels", job.metadata.labels),
        *_kueue_warnings("annotations", job.metadata.annotations),
        *_priority_warnings(job.metadata.labels),
        *(found for path, pod in pods for found in _pod_warnings(path, pod)),
        *_byte_warnings(_amounts_of_bytes(job.spec)),
        *_password_warnings(job.spec),
        *_shared_memory_warnings(job.spec),
        *_elastic_warnings(job.spec),
        *training_warnings(job.spec),
        *_size_warnings(job),
    )


def _service_account_violations(name: str | None, allowed_names: Collection[str] | None) -> Iterator[Violation]:
    if name is not None and allowed_names is not None and name not in allowed_names:
        allowed = f"use one of {', '.join(allowed_names)}, " if allowed_names else "remove it, "
        yield Violation(
            rule=SERVICE_ACCOUNT_RULE,
            path=("spec", "serviceAccountName"),
            wrong="jobs may not use this ServiceAccount",
            advice=f"{allowed}or ask the administrator to add it to the operator's value jobs.serviceAccountNames",
            seen=json.dumps(name),
        )


def _queue_violations(spec: RLJobSpec, labels: Mapping[str, str]) -> Iterator[Violation]:
    if labels.get(QUEUE_LABEL) and spec.run_policy.elastic is not None:
        yield Violation(
            rule=ELASTIC_RULE,
            path=("spec", "runPolicy", "elastic"),
            wrong=f"does not work in a queue of Kueue, which admits all worker pods or none (label {QUEUE_LABEL})",
            advice=f"remove it, or remove the label {QUEUE_LABEL} from metadata.labels",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def _kueue_warnings(field: str, entries: Mapping[str, str]) -> Iterator[Violation]:
    for key, value in entries.items():
        is_used = field == "labels" and key in (QUEUE_LABEL, PRIORITY_CLASS_LABEL) and value != ""
        if key.startswith(KUEUE_PREFIX) and not is_used:
            yield Violation(
                rule="Metadata.queue",
                path=("metadata", field, key),
                wrong="has no effect: RLJob uses only two labels of Kueue",
                advice=f"remove it, or set the label {QUEUE_LABEL} or {PRIORITY_CLASS_LABEL}",
                seen=json.dumps(value),
            )


def _priority_warnings(labels: Mapping[str, str]) -> Iterator[Violation]:
    """A warning about a priority without a queue. An empty one already has another warning."""
    priority = labels.get(PRIORITY_CLASS_LABEL)
    if priority and not labels.get(QUEUE_LABEL):
        yield Violation(
            rule="Metadata.priority",
            path=("metadata", "labels", PRIORITY_CLASS_LABEL),
            wrong=f"has no effect without the label {QUEUE_LABEL}",
            advice=f"set {QUEUE_LABEL} to the job's queue, or remove this label",
            seen=json.dumps(priority),
        )


def _amounts_of_bytes(spec: RLJobSpec) -> Iterator[tuple[Path, str]]:
    """Path and value of each amount of bytes outside `resources`."""
    for index, pool in enumerate(spec.pools):
        yield ("spec", "pools", index, "sharedMemory"), pool.shared_memory
    for index, volume in enumerate(spec.volumes):
        if volume.empty_dir is not None and volume.empty_dir.size_limit is not None:
            yield ("spec", "volumes", index, "emptyDir", "sizeLimit"), volume.empty_dir.size_limit
    yield ("spec", "training", "rollout", "cpuKvCache"), spec.training.rollout.cpu_kv_cache


def _byte_warnings(amounts: Iterator[tuple[Path, str]]) -> Iterator[Violation]:
    for path, text in amounts:
        if number_of(text).denominator != 1:
            yield Violation(
                rule="Resources.bytes",
                path=path,
                wrong="is not a whole number of bytes",
                advice="use for example 400M or 400Mi (the suffix 'm' means thousandths)",
                seen=json.dumps(text),
            )


def _password_warnings(spec: RLJobSpec) -> Iterator[Violation]:
    """Warnings about passwords in URLs. A rule already rejects variables whose names say that they hold a secret."""
    for index, variable in enumerate(spec.env):
        if variable.value is not None and re.search(_URL_WITH_PASSWORD, variable.value):
            yield Violation(
                rule=URL_PASSWORD_RULE,
                path=("spec", "env", index, "value"),
                wrong="contains a URL with a password, which everybody who may read the job can read",
                advice="store the value in a Secret and refer to it in valueFrom.secretKeyRef, or use envFrom",
            )


def _shared_memory_warnings(spec: RLJobSpec) -> Iterator[Violation]:
    """Warnings about pools whose shared memory can use up the memory limit."""
    for index, pool in enumerate(spec.pools):
        limit = pool.resources.limits.get("memory")
        if limit is not None and number_of(pool.shared_memory) >= number_of(limit):
            yield Violation(
                rule="Pool.sharedMemory",
                path=("spec", "pools", index, "sharedMemory"),
                wrong=(
                    f"is not below resources.limits.memory ({limit}), which also counts what is stored in /dev/shm; the"
                    " pod can be killed (OOMKilled) before /dev/shm is full"
                ),
                advice="reduce sharedMemory, or increase resources.limits.memory",
                seen=json.dumps(pool.shared_memory),
            )


def _elastic_warnings(spec: RLJobSpec) -> Iterator[Violation]:
    """A warning if `runPolicy.elastic` never applies."""
    elastic = spec.run_policy.elastic
    if elastic is None or can_use_fewer_nodes(spec):
        return
    reduce = "reduce minNodes, " if elastic.min_nodes > 1 and any(pool.nodes > 1 for pool in spec.pools) else ""
    if all(pool.nodes <= elastic.min_nodes for pool in spec.pools):
        wrong = "has no effect: no pool has more nodes than minNodes"
        advice = f"{reduce}increase the nodes of a pool, or remove runPolicy.elastic"
    else:
        wrong = "has no effect: the job is not valid with fewer nodes (down to minNodes)"
        advice = f"{reduce}choose a batchSize that can be divided among fewer GPUs, or remove runPolicy.elastic"
    yield Violation(
        rule="Elastic.minNodes",
        path=("spec", "runPolicy", "elastic", "minNodes"),
        wrong=wrong,
        advice=advice,
        seen=str(elastic.min_nodes),
    )


def _pod_warnings(path: Path, pod: Head | Pool) -> Iterator[Violation]:
    """Warnings about the settings of the head pod or of the worker pods of a pool; `path` is the path of the
    settings."""
    yield from _byte_warnings(
        ((*path, "resources", field, name), text)
        for field, amounts in (("requests", pod.resources.requests), ("limits", pod.resources.limits))
        for name, text in amounts.items()
        if name in _BYTE_RESOURCES
    )
    yield from _deprecation_warnings((*path, "template"), pod.template)
    if pod.template.affinity is not None:
        for at, term in _pod_terms(pod.template.affinity):
            if term.label_selector is None:
                yield Violation(
                    rule="PodTerm.labelSelector",
                    path=(*path, "template", "affinity", *at),
                    wrong="has no labelSelector and selects no pods",
                    advice="add a labelSelector ({} selects all pods of the namespaces)",
                )


def _deprecation_warnings(path: Path, overlay: PodOverlay) -> Iterator[Violation]:
    for key in overlay.annotations:
        at = (*path, "annotations", key)
        if key == f"{APPARMOR}{RAY_CONTAINER}":
            yield Violation(
                rule="PodOverlay.appArmor",
                path=at,
                wrong="is deprecated since Kubernetes 1.30, but still has an effect",
                advice="remove it if the default profile of the nodes is sufficient",
            )
        elif key in _IGNORED_ANNOTATIONS:
            yield Violation(
                rule="PodOverlay.ignoredAnnotation",
                path=at,
                wrong="has no effect: Kubernetes no longer reads this annotation",
                advice=_IGNORED_ANNOTATIONS[key],
            )
    labels: list[tuple[Path, str]] = [(("nodeSelector", key), key) for key in overlay.node_selector]
    if overlay.affinity is not None:
        labels += [(("affinity", *at), key) for at, key in _node_labels(overlay.affinity)]
    for at, key in labels:
        if key in _DEPRECATED_LABELS:
            yield Violation(
                rule="PodOverlay.deprecatedLabel",
                path=(*path, *at),
                wrong="is a deprecated label that new nodes may not have",
                advice=f"use {_DEPRECATED_LABELS[key]}",
                seen=None if at[-1] == key else json.dumps(key),
            )


def _node_labels(affinity: Affinity) -> Iterator[tuple[Path, str]]:
    """Path and key of each node label in an affinity."""
    if (nodes := affinity.node_affinity) is not None:
        required = nodes.required_during_scheduling_ignored_during_execution
        terms: list[tuple[Path, NodeTerm]] = [
            ((_REQUIRED, "nodeSelectorTerms", index), term)
            for index, term in enumerate(required.node_selector_terms if required is not None else ())
        ]
        terms += [
            ((_PREFERRED, index, "preference"), each.preference)
            for index, each in enumerate(nodes.preferred_during_scheduling_ignored_during_execution)
        ]
        for at, term in terms:
            for index, each in enumerate(term.match_expressions):
                yield ("nodeAffinity", *at, "matchExpressions", index, "key"), each.key
    for at, pods in _pod_terms(affinity):
        yield (*at, "topologyKey"), pods.topology_key


def _pod_terms(affinity: Affinity) -> Iterator[tuple[Path, PodTerm]]:
    """Path and term of each pod affinity and anti-affinity."""
    for field in ("pod_affinity", "pod_anti_affinity"):
        part = affinity.pod_affinity if field == "pod_affinity" else affinity.pod_anti_affinity
        if part is None:
            continue
        above = wire_name(Affinity, field)
        for index, term in enumerate(part.required_during_scheduling_ignored_during_execution):
            yield (above, _REQUIRED, index), term
        for index, each in enumerate(part.preferred_during_scheduling_ignored_during_execution):
            yield (above, _PREFERRED, index, "podAffinityTerm"), each.pod_affinity_term


def _size_warnings(job: RLJob) -> Iterator[Violation]:
    """A warning if the job is too large for a Kubernetes cluster. `rljob run` can still run it."""
    try:
        dump_job(TrainerJob(name=job.metadata.name, spec=job.spec))
    except DocumentError as error:
        yield Violation(
            rule="RLJobSpec.size",
            path=("spec",),
            wrong=f"is too large for a Kubernetes cluster ({error})",
            advice="ignore this warning if you use only `rljob run`",
        )
