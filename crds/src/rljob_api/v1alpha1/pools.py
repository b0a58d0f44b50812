"""Pools of machines, and what may be said about their pods."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictStr

from rljob_api.base import WireModel
from rljob_api.constants import RAY_CONTAINER
from rljob_api.rule import Path, key_rule, rule, starts_with_none_cel
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
from rljob_api.v1alpha1.resources import QUOTA, Resources, is_device_cel, is_resource_name

OWNED_LABEL_PREFIXES = ("rljob.dev/", "ray.io/", "kueue.x-k8s.io/")
# KubeRay's service of the head pod selects by the first of these.
OWNED_LABELS = ("app.kubernetes.io/created-by", "app.kubernetes.io/managed-by")
OWNED_ANNOTATION_PREFIXES = ("rljob.dev/", "ray.io/")
OWNED_POOL_NAMES = ("head", "headgroup")
APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
_SECCOMP = ("seccomp.security.alpha.kubernetes.io/", "container.seccomp.security.alpha.kubernetes.io/")
_OTHERS = (
    "controller.kubernetes.io/pod-deletion-cost",
    "kubernetes.io/config.mirror",
    "scheduler.alpha.kubernetes.io/tolerations",
)
"""Annotations that the API server accepts only with some values. They have no effect on the pods of a job, as those for
seccomp have none since Kubernetes 1.27; so all are refused."""
_PROFILES = ("", "runtime/default", "unconfined")
_OWN_PROFILE = "localhost/"
Annotation = Annotated[StrictStr, Field(max_length=4096)]


class TolerationOperator(StrEnum):
    """How a toleration compares."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """Effect of the taint that is tolerated."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(WireModel):
    """A toleration, as in a pod."""

    key: LabelKey | None = None
    operator: TolerationOperator = TolerationOperator.EQUAL
    value: LabelValue | None = None
    effect: TaintEffect | None = None
    toleration_seconds: Count | None = None


class PodOverlay(WireModel):
    """What a job may say about its pods. Everything else belongs to the operator."""

    labels: LabelMap = Field(default_factory=dict)
    annotations: Annotated[dict[StrictStr, Annotation], Field(max_length=32), WITHOUT_NULLS] = Field(
        default_factory=dict
    )
    node_selector: LabelMap = Field(default_factory=dict)
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32)] = ()
    affinity: Affinity | None = None
    priority_class_name: DnsName | None = None
    runtime_class_name: DnsName | None = None
    scheduler_name: DnsName | None = None


class Pool(WireModel):
    """Equal nodes with GPUs: one Ray worker group on a cluster and one resource pool in the trainer."""

    name: DnsLabel
    nodes: Annotated[PositiveCount, Field(le=1024)] = 1
    gpus_per_node: Annotated[PositiveCount, Field(le=64)] = 1
    """Also the number of trainer processes per node."""
    gpu_resource: ResourceWithDomain = "nvidia.com/gpu"
    """Resource name of one GPU on the cluster, for example `amd.com/gpu` or `nvidia.com/mig-3g.40gb`."""
    shared_memory: Quantity = "8Gi"
    """Size of /dev/shm in each pod; counts as memory."""
    resources: Resources = Field(default_factory=Resources)
    template: PodOverlay = Field(default_factory=PodOverlay)


class Head(WireModel):
    """The pod that runs the controller and loads the data. It has no GPU."""

    resources: Resources = Field(default_factory=Resources)
    template: PodOverlay = Field(default_factory=PodOverlay)


def _not_taken(overlay: PodOverlay) -> list[Path]:
    return [(key,) for key in overlay.annotations if key.startswith(_SECCOMP) or key in _OTHERS]


def _bad_profiles(overlay: PodOverlay) -> list[Path]:
    """Profiles of AppArmor that the API server would refuse in pods of ours."""
    return [
        (key,)
        for key, value in overlay.annotations.items()
        if key.startswith(APPARMOR)
        and (key != f"{APPARMOR}{RAY_CONTAINER}" or not (value in _PROFILES or value.startswith(_OWN_PROFILE)))
    ]


POOL_RULES = (
    rule(
        Pool,
        "Pool.nameNotHead",
        field=".name",
        cel=f"!(self.name in {list(OWNED_POOL_NAMES)})",
        wrong="a pool cannot be called " + " or ".join(OWNED_POOL_NAMES),
        advice="these are names of the pod with the controller; choose another",
        holds=lambda pool: pool.name not in OWNED_POOL_NAMES,
    ),
    rule(
        Pool,
        "Pool.gpusNotInResources",
        field=".resources",
        cel="!(self.gpuResource in self.resources.requests) && !(self.gpuResource in self.resources.limits)",
        wrong="GPUs must not be written under resources",
        advice="use gpusPerNode and gpuResource",
        holds=lambda pool: pool.gpu_resource not in pool.resources.requests.keys() | pool.resources.limits.keys(),
    ),
    rule(
        PodOverlay,
        "PodOverlay.labels",
        field=".labels",
        cel=(
            f"!has(self.labels) || self.labels.all(k, {starts_with_none_cel('k', OWNED_LABEL_PREFIXES)}"
            f" && !(k in {list(OWNED_LABELS)}))"
        ),
        wrong=f"labels under {', '.join(OWNED_LABEL_PREFIXES)}, and {', '.join(OWNED_LABELS)} are owned by RLJob",
        advice="choose another prefix",
        holds=lambda overlay: (
            not any(key.startswith(OWNED_LABEL_PREFIXES) or key in OWNED_LABELS for key in overlay.labels)
        ),
    ),
    rule(
        PodOverlay,
        "PodOverlay.annotations",
        field=".annotations",
        cel=(
            f"!has(self.annotations) || self.annotations.all(k, {starts_with_none_cel('k', OWNED_ANNOTATION_PREFIXES)})"
        ),
        wrong="annotations under " + ", ".join(OWNED_ANNOTATION_PREFIXES) + " are owned by RLJob",
        advice="choose another prefix",
        holds=lambda overlay: not any(key.startswith(OWNED_ANNOTATION_PREFIXES) for key in overlay.annotations),
    ),
    rule(
        Toleration,
        "Toleration.existsHasNoValue",
        field=".value",
        cel="self.operator != 'Exists' || !has(self.value) || self.value == ''",
        wrong="a toleration with operator Exists takes no value",
        advice="remove the value, or use operator Equal",
        holds=lambda toleration: toleration.operator is not TolerationOperator.EXISTS or not toleration.value,
    ),
    rule(
        Toleration,
        "Toleration.equalHasKey",
        field=".key",
        cel="self.operator != 'Equal' || has(self.key)",
        wrong="a toleration without a key needs operator Exists",
        advice="write the key of the taint, or operator Exists to tolerate all",
        holds=lambda toleration: toleration.operator is not TolerationOperator.EQUAL or toleration.key is not None,
    ),
    rule(
        Toleration,
        "Toleration.secondsOnlyForNoExecute",
        field=".tolerationSeconds",
        cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
        wrong="tolerationSeconds needs effect NoExecute",
        advice="set the effect, or remove the seconds",
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
            f"!has(self.annotations) || self.annotations.all(k, !(k in {list(_OTHERS)})"
            + "".join(f" && !k.startsWith('{prefix}')" for prefix in _SECCOMP)
            + ")"
        ),
        wrong="RLJob does not take annotations for seccomp, mirror pods, deletion costs and alpha tolerations",
        advice="remove it",
        holds=lambda overlay: not _not_taken(overlay),
        places=_not_taken,
    ),
    rule(
        PodOverlay,
        "PodOverlay.appArmor",
        field=".annotations",
        cel=(
            f"!has(self.annotations) || self.annotations.all(k, !k.startsWith('{APPARMOR}') ||"
            f" k == '{APPARMOR}{RAY_CONTAINER}' && (self.annotations[k] in {list(_PROFILES)} ||"
            f" self.annotations[k].startsWith('{_OWN_PROFILE}')))"
        ),
        wrong=f"an AppArmor profile can only be one of the container {RAY_CONTAINER}",
        advice=f"write {APPARMOR}{RAY_CONTAINER}: runtime/default, unconfined, or localhost/<profile>",
        holds=lambda overlay: not _bad_profiles(overlay),
        places=_bad_profiles,
    ),
    rule(
        Pool,
        "Pool.gpuResource",
        field=".gpuResource",
        cel=is_device_cel("self.gpuResource"),
        wrong=(
            f"the domain must not contain kubernetes.io, begin with {QUOTA}, or have more than {MAX_RESOURCE_DOMAIN}"
            " characters"
        ),
        advice="write the name that the nodes show, such as nvidia.com/gpu",
        holds=lambda pool: is_resource_name(pool.gpu_resource),
    ),
)
