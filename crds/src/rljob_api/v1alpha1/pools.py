"""Pools of worker pods with GPUs, the head pod, and the settings of their pods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictStr

from rljob_api.base import WireModel
from rljob_api.constants import RAY_CONTAINER
from rljob_api.rule import ContractT, Path, Rule, key_rule, rule, starts_with_none_cel
from rljob_api.scalars import (
    ANNOTATION_KEY,
    MAX_RESOURCE_DOMAIN,
    WITHOUT_NULLS,
    Count,
    DnsLabel,
    DnsName,
    LabelKey,
    LabelMap,
    LabelValue,
    PositiveCount,
    Quantity,
    ResourceWithDomain,
)
from rljob_api.v1alpha1.affinity import Affinity
from rljob_api.v1alpha1.resources import QUOTA, Resources, is_extended_resource_cel, is_resource_name

KUEUE_PREFIX = "kueue.x-k8s.io/"
QUEUE_LABEL, PRIORITY_CLASS_LABEL = f"{KUEUE_PREFIX}queue-name", f"{KUEUE_PREFIX}priority-class"
"""Labels of a job in a queue of Kueue, which the operator copies to the job's RayCluster."""
OWNED_LABEL_PREFIXES = ("rljob.dev/", "ray.io/", KUEUE_PREFIX)
# KubeRay's Service for the head pod selects pods by the first of these labels.
OWNED_LABELS = ("app.kubernetes.io/created-by", "app.kubernetes.io/managed-by")
OWNED_ANNOTATION_PREFIXES = ("rljob.dev/", "ray.io/")
OWNED_POOL_NAMES = ("head", "headgroup")
MIG = "/mig-"
"""A part of the names of resources that are MIG devices, such as `nvidia.com/mig-3g.40gb`."""
APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
"""Prefix of the annotation with the AppArmor profile of a container, followed by the container's name."""
_SECCOMP = ("seccomp.security.alpha.kubernetes.io/", "container.seccomp.security.alpha.kubernetes.io/")
_UNSUPPORTED_ANNOTATIONS = (
    "controller.kubernetes.io/pod-deletion-cost",
    "kubernetes.io/config.mirror",
    "scheduler.alpha.kubernetes.io/tolerations",
)
"""Annotations that the API server accepts only with certain values, and that have no effect on the pods of a job. A
rule rejects them. It also rejects seccomp annotations, which have no effect since Kubernetes 1.27."""
_APPARMOR_PROFILES = ("", "runtime/default", "unconfined")
_APPARMOR_LOCALHOST = "localhost/"
Annotation = Annotated[StrictStr, Field(max_length=4096)]


class TolerationOperator(StrEnum):
    """How a toleration is compared with a taint: `Exists` matches any value, `Equal` the same value."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """Effect of the taints that are tolerated; all effects when unset."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(WireModel):
    """A toleration, as in a pod."""

    key: LabelKey | None = None
    """Key of the taint, for example `nvidia.com/gpu`; any key when unset (with operator Exists)."""
    operator: TolerationOperator = TolerationOperator.EQUAL
    value: LabelValue | None = None
    """Value of the taint, for operator Equal."""
    effect: TaintEffect | None = None
    toleration_seconds: Count | None = None
    """Seconds for which a NoExecute taint is tolerated; forever when unset."""


class PodOverlay(WireModel):
    """Pod settings that a job may choose. The operator sets all other fields of the job's pods."""

    labels: LabelMap = Field(default_factory=dict)
    """Additional labels of the pods, for example `{team: research}`."""
    annotations: Annotated[dict[StrictStr, Annotation], Field(max_length=32), WITHOUT_NULLS] = Field(
        default_factory=dict
    )
    """Additional annotations of the pods, for example `{example.com/note: nightly}`."""
    node_selector: LabelMap = Field(default_factory=dict)
    """Labels that a Kubernetes node must have to run the pods, for example `{gpu-type: h100}`."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32)] = ()
    """Taints of nodes that the pods tolerate."""
    affinity: Affinity | None = None
    priority_class_name: DnsName | None = None
    """Name of the PriorityClass of the pods; the cluster's default when unset."""
    runtime_class_name: DnsName | None = None
    """Name of the RuntimeClass of the pods, for example `nvidia`; when unset, the default of the node's container
    runtime."""
    scheduler_name: DnsName | None = None
    """Name of the scheduler of the pods; the cluster's default when unset."""


class Pool(WireModel):
    """Identical worker pods with GPUs: one worker group of the RayCluster."""

    name: DnsLabel
    """Name of the pool, by which roles refer to it, for example `main`."""
    nodes: Annotated[PositiveCount, Field(le=1024)] = 1
    """Number of worker pods. Each is one Ray node; several may run on the same Kubernetes node if it has enough GPUs.
    `template.affinity` can spread them."""
    gpus_per_node: Annotated[PositiveCount, Field(le=64)] = 1
    """Number of GPUs of each worker pod. The pod runs one worker process per GPU."""
    gpu_resource: ResourceWithDomain = "nvidia.com/gpu"
    """Kubernetes resource name of the GPUs, for example `amd.com/gpu` or `nvidia.com/mig-3g.40gb`."""
    shared_memory: Quantity = "8Gi"
    """Size of /dev/shm in each worker pod, for example `8Gi`. What is stored there counts toward the pod's memory
    limit."""
    resources: Resources = Field(default_factory=Resources)
    template: PodOverlay = Field(default_factory=PodOverlay)


class Head(WireModel):
    """The pod that runs Ray's head node and the trainer's controller, which loads the dataset. It needs no GPU."""

    resources: Resources = Field(default_factory=Resources)
    template: PodOverlay = Field(default_factory=PodOverlay)


def _reserved(entries: Mapping[str, str], prefixes: tuple[str, ...], keys: tuple[str, ...] = ()) -> list[Path]:
    """Paths, relative to `entries`, of labels or annotations whose key has one of the prefixes, or is one of `keys`."""
    return [(key,) for key in entries if key.startswith(prefixes) or key in keys]


def _unsupported_annotations(overlay: PodOverlay) -> list[Path]:
    return [(key,) for key in overlay.annotations if key.startswith(_SECCOMP) or key in _UNSUPPORTED_ANNOTATIONS]


def _invalid_apparmor(overlay: PodOverlay) -> list[Path]:
    """Paths, relative to `annotations`, of AppArmor annotations that the API server would reject on a job's pods."""
    return [
        (key,)
        for key, value in overlay.annotations.items()
        if key.startswith(APPARMOR)
        and (
            key != f"{APPARMOR}{RAY_CONTAINER}"
            or not (value in _APPARMOR_PROFILES or value.startswith(_APPARMOR_LOCALHOST))
        )
    ]


def owned_labels_rule(on: type[ContractT], read: Callable[[ContractT], Mapping[str, str]]) -> Rule:
    """The rule that the field `labels` of a type has no label of the operator, of KubeRay or of Kueue. `read` returns
    the labels."""

    def fault_paths(value: ContractT) -> list[Path]:
        return _reserved(read(value), OWNED_LABEL_PREFIXES, OWNED_LABELS)

    return rule(
        on,
        f"{on.__name__}.labels",
        field=".labels",
        cel=f"self.labels.all(k, {starts_with_none_cel('k', OWNED_LABEL_PREFIXES)} && !(k in {list(OWNED_LABELS)}))",
        wrong=(
            f"a job must not set label keys with the prefixes {', '.join(OWNED_LABEL_PREFIXES)}, nor the keys"
            f" {', '.join(OWNED_LABELS)}"
        ),
        advice="remove the label, or use another key",
        holds=lambda value: not fault_paths(value),
        fault_paths=fault_paths,
        details=lambda _, path: (
            ["labels of Kueue belong in metadata.labels of the job"] if str(path[0]).startswith(KUEUE_PREFIX) else []
        ),
        is_about_key=True,
    )


POOL_RULES = (
    rule(
        Pool,
        "Pool.nameNotHead",
        field=".name",
        cel=f"!(self.name in {list(OWNED_POOL_NAMES)})",
        wrong="must not be " + " or ".join(OWNED_POOL_NAMES) + ", which KubeRay uses for the head group",
        advice="choose another pool name",
        holds=lambda pool: pool.name not in OWNED_POOL_NAMES,
    ),
    rule(
        Pool,
        "Pool.gpusNotInResources",
        field=".resources",
        cel="!(self.gpuResource in self.resources.requests) && !(self.gpuResource in self.resources.limits)",
        wrong="must not contain the pool's gpuResource (default nvidia.com/gpu)",
        advice="remove it from requests and limits, and set the number of GPUs in gpusPerNode",
        holds=lambda pool: pool.gpu_resource not in pool.resources.requests.keys() | pool.resources.limits.keys(),
    ),
    owned_labels_rule(PodOverlay, lambda overlay: overlay.labels),
    rule(
        PodOverlay,
        "PodOverlay.annotations",
        field=".annotations",
        cel=f"self.annotations.all(k, {starts_with_none_cel('k', OWNED_ANNOTATION_PREFIXES)})",
        wrong=f"a job must not set annotation keys with the prefixes {', '.join(OWNED_ANNOTATION_PREFIXES)}",
        advice="remove the annotation, or use another key",
        holds=lambda overlay: not _reserved(overlay.annotations, OWNED_ANNOTATION_PREFIXES),
        fault_paths=lambda overlay: _reserved(overlay.annotations, OWNED_ANNOTATION_PREFIXES),
        is_about_key=True,
    ),
    rule(
        Toleration,
        "Toleration.existsHasNoValue",
        field=".value",
        cel="self.operator != 'Exists' || !has(self.value) || self.value == ''",
        wrong="must be empty with operator Exists",
        advice="remove the value, or use operator Equal",
        holds=lambda toleration: toleration.operator is not TolerationOperator.EXISTS or not toleration.value,
    ),
    rule(
        Toleration,
        "Toleration.equalHasKey",
        field=".key",
        cel="self.operator != 'Equal' || has(self.key)",
        wrong="is required with operator Equal",
        advice="set the key of the taint, or use operator Exists to tolerate all taints",
        holds=lambda toleration: toleration.operator is not TolerationOperator.EQUAL or toleration.key is not None,
    ),
    rule(
        Toleration,
        "Toleration.secondsOnlyForNoExecute",
        field=".tolerationSeconds",
        cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
        wrong="requires effect: NoExecute",
        advice="set effect: NoExecute, or remove tolerationSeconds",
        holds=lambda t: t.toleration_seconds is None or t.effect is TaintEffect.NO_EXECUTE,
    ),
    key_rule(PodOverlay, "labels", lambda overlay: overlay.labels),
    key_rule(PodOverlay, "annotations", lambda overlay: overlay.annotations, ANNOTATION_KEY),
    key_rule(PodOverlay, "node_selector", lambda overlay: overlay.node_selector),
    rule(
        PodOverlay,
        "PodOverlay.annotationsTaken",
        field=".annotations",
        cel=(
            f"self.annotations.all(k, !(k in {list(_UNSUPPORTED_ANNOTATIONS)})"
            + "".join(f" && !k.startsWith('{prefix}')" for prefix in _SECCOMP)
            + ")"
        ),
        wrong="annotations for seccomp, mirror pods, deletion cost and alpha tolerations are not supported",
        advice="remove the annotation",
        holds=lambda overlay: not _unsupported_annotations(overlay),
        fault_paths=_unsupported_annotations,
        is_about_key=True,
    ),
    rule(
        PodOverlay,
        "PodOverlay.appArmor",
        field=".annotations",
        cel=(
            f"self.annotations.all(k, !k.startsWith('{APPARMOR}') ||"
            f" k == '{APPARMOR}{RAY_CONTAINER}' && (self.annotations[k] in {list(_APPARMOR_PROFILES)} ||"
            f" self.annotations[k].startsWith('{_APPARMOR_LOCALHOST}')))"
        ),
        wrong=f"the AppArmor annotation must name the container {RAY_CONTAINER} and a valid profile",
        advice=f"use the key {APPARMOR}{RAY_CONTAINER} with runtime/default, unconfined, or localhost/<profile>",
        holds=lambda overlay: not _invalid_apparmor(overlay),
        fault_paths=_invalid_apparmor,
    ),
    rule(
        Pool,
        "Pool.gpuResource",
        field=".gpuResource",
        cel=is_extended_resource_cel("self.gpuResource"),
        wrong=(
            f"the domain must not contain kubernetes.io, begin with {QUOTA}, or have more than {MAX_RESOURCE_DOMAIN}"
            " characters"
        ),
        advice="use the resource name that `kubectl describe node` shows, such as nvidia.com/gpu",
        holds=lambda pool: is_resource_name(pool.gpu_resource),
    ),
)
