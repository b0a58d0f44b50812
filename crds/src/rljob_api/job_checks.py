"""What is asked of a valid job beyond the rules of the schema: what it needs on a cluster, which neither the schema nor
`rljob run` may ask for; and warnings of what is probably a mistake. The API server accepts pods with these, some with a
warning of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from rljob_api.constants import MIN_RAY_VERSION, RAY_CONTAINER
from rljob_api.errors import HandoverError
from rljob_api.handover import TrainerJob, dump_job
from rljob_api.quantities import number_of
from rljob_api.rule import Path, Violation, wire_name
from rljob_api.v1alpha1.affinity import Affinity, NodeTerm, PodTerm
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.pools import APPARMOR, Head, PodOverlay, Pool
from rljob_api.v1alpha1.spec import RLJobSpec

STORAGE_RULE = "RLJobSpec.storageOnCluster"
IMAGE_RULE = "RLJobSpec.imageOnCluster"
RAY_VERSION_RULE = "RLJobSpec.rayVersionOnCluster"
_VERSION = r"\d+\.\d+\.\d+"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_KUEUE = "kueue.x-k8s.io/"
_BYTES = ("memory", "ephemeral-storage")
_DEPRECATED_LABELS = {
    "beta.kubernetes.io/arch": "kubernetes.io/arch",
    "beta.kubernetes.io/instance-type": "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/os": "kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region": "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone": "topology.kubernetes.io/zone",
}
"""Labels of nodes, and those that took their place."""
_IGNORED_ANNOTATIONS = {
    "scheduler.alpha.kubernetes.io/critical-pod": "remove it (priorityClassName does this)",
    "security.alpha.kubernetes.io/sysctls": "remove it",
    "security.alpha.kubernetes.io/unsafe-sysctls": "remove it",
}


def cluster_violations(spec: RLJobSpec, *, has_default_image: bool) -> tuple[Violation, ...]:
    """Everything that keeps the job from running on a cluster although it is valid. `has_default_image`: whether the
    operator brings a trainer image of its own."""
    found = []
    if spec.checkpoint.storage is None:
        found.append(
            Violation(
                rule=STORAGE_RULE,
                path=("spec", "checkpoint", "storage"),
                wrong="is not set, and on a cluster the pods have no other folder in common",
                advice="name a ReadWriteMany PersistentVolumeClaim: storage: {persistentVolumeClaim: <name>}",
            )
        )
    if spec.image is None and not has_default_image:
        found.append(
            Violation(
                rule=IMAGE_RULE,
                path=("spec", "image"),
                wrong="is not set, and this operator has no default trainer image",
                advice="name the trainer's image",
            )
        )
    if spec.ray_version is not None and not is_ray_new_enough(spec.ray_version):
        found.append(
            Violation(
                rule=RAY_VERSION_RULE,
                path=("spec", "rayVersion"),
                wrong=f"must be at least {MIN_RAY_VERSION}, as older versions let strangers into the cluster",
                advice="use an image with a newer Ray, and write that version here",
                seen=spec.ray_version,
            )
        )
    return tuple(found)


def is_ray_new_enough(version: str) -> bool:
    """Whether a version such as 2.60.0 is at least `MIN_RAY_VERSION`; what is no such version is not."""
    is_version = re.fullmatch(_VERSION, version, flags=re.ASCII) is not None
    return is_version and _numbers(version) >= _numbers(MIN_RAY_VERSION)


def job_warnings(job: RLJob) -> tuple[Violation, ...]:
    """All of them, with their places in the job."""
    places: list[tuple[Path, Head | Pool]] = [(("spec", "head"), job.spec.head)]
    places += [(("spec", "pools", index), pool) for index, pool in enumerate(job.spec.pools)]
    return (
        *_kueue("labels", job.metadata.labels),
        *_kueue("annotations", job.metadata.annotations),
        *(found for path, part in places for found in _of_pods(path, part)),
        *_bytes(_amounts_of_bytes(job.spec)),
        *_size(job),
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def _kueue(field: str, entries: Mapping[str, str]) -> Iterator[Violation]:
    for key, value in entries.items():
        if key.startswith(_KUEUE):
            yield Violation(
                rule="Metadata.queue",
                path=("metadata", field, key),
                wrong="has no effect: this version does not work with Kueue, and the job starts without waiting in a"
                " queue",
                advice="remove it, or create the job when there is room for it",
                seen=json.dumps(value),
            )


def _amounts_of_bytes(spec: RLJobSpec) -> Iterator[tuple[Path, str]]:
    """Those outside of `resources`."""
    for index, pool in enumerate(spec.pools):
        yield ("spec", "pools", index, "sharedMemory"), pool.shared_memory
    for index, volume in enumerate(spec.volumes):
        if volume.empty_dir is not None and volume.empty_dir.size_limit is not None:
            yield ("spec", "volumes", index, "emptyDir", "sizeLimit"), volume.empty_dir.size_limit
    yield ("spec", "training", "rollout", "cpuKvCache"), spec.training.rollout.cpu_kv_cache


def _bytes(amounts: Iterator[tuple[Path, str]]) -> Iterator[Violation]:
    for path, text in amounts:
        if number_of(text).denominator != 1:
            yield Violation(
                rule="Resources.bytes",
                path=path,
                wrong="is not a whole number of bytes",
                advice="write such as 400M or 400Mi ('m' stands for thousandths)",
                seen=json.dumps(text),
            )


def _of_pods(path: Path, part: Head | Pool) -> Iterator[Violation]:
    yield from _bytes(
        ((*path, "resources", field, name), text)
        for field, amounts in (("requests", part.resources.requests), ("limits", part.resources.limits))
        for name, text in amounts.items()
        if name in _BYTES
    )
    yield from _deprecated((*path, "template"), part.template)
    if part.template.affinity is not None:
        for at, term in _pod_terms(part.template.affinity):
            if term.label_selector is None:
                yield Violation(
                    rule="PodTerm.labelSelector",
                    path=(*path, "template", "affinity", *at),
                    wrong="has no labelSelector and selects no pod",
                    advice="write a labelSelector ({} selects all pods of the namespaces)",
                )


def _deprecated(path: Path, overlay: PodOverlay) -> Iterator[Violation]:
    for key in overlay.annotations:
        at = (*path, "annotations", key)
        if key == f"{APPARMOR}{RAY_CONTAINER}":
            yield Violation(
                rule="PodOverlay.appArmor",
                path=at,
                wrong="is deprecated since Kubernetes 1.30, which still applies it",
                advice="remove it where the default profile of the nodes is enough",
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
        labels += [(("affinity", *at), key) for at, key in _labels_of_nodes(overlay.affinity)]
    for at, key in labels:
        if key in _DEPRECATED_LABELS:
            yield Violation(
                rule="PodOverlay.deprecatedLabel",
                path=(*path, *at),
                wrong="is a deprecated label, which new nodes may not have",
                advice=f"use {_DEPRECATED_LABELS[key]}",
                seen=None if at[-1] == key else json.dumps(key),
            )


def _labels_of_nodes(affinity: Affinity) -> Iterator[tuple[Path, str]]:
    """Keys of labels of nodes, with their places in an affinity."""
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
    """The terms of affinity and anti-affinity to pods, with their places."""
    for field in ("pod_affinity", "pod_anti_affinity"):
        part = affinity.pod_affinity if field == "pod_affinity" else affinity.pod_anti_affinity
        if part is None:
            continue
        above = wire_name(Affinity, field)
        for index, term in enumerate(part.required_during_scheduling_ignored_during_execution):
            yield (above, _REQUIRED, index), term
        for index, each in enumerate(part.preferred_during_scheduling_ignored_during_execution):
            yield (above, _PREFERRED, index, "podAffinityTerm"), each.pod_affinity_term


def _size(job: RLJob) -> Iterator[Violation]:
    """A large job runs on one machine, and never gets to the pods of a cluster."""
    try:
        dump_job(TrainerJob(name=job.metadata.name, spec=job.spec))
    except HandoverError as error:
        yield Violation(
            rule="RLJobSpec.size",
            path=("spec",),
            wrong=f"is too large for a cluster ({error})",
            advice="ignore this for `rljob run`",
        )
