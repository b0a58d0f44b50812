"""Pools of machines, and what may be said about their pods."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictStr

from rljob_api.base import WireModel
from rljob_api.scalars import (
    WITHOUT_NULLS,
    AbsolutePath,
    Count,
    DnsLabel,
    DnsName,
    EnvName,
    FileKey,
    Flag,
    LabelKey,
    LabelMap,
    LabelValue,
    LongText,
    PositiveCount,
    Quantity,
    ResourceWithDomain,
)
from rljob_api.v1alpha1.affinity import Affinity

Annotation = Annotated[StrictStr, Field(max_length=4096)]
ResourceMap = Annotated[dict[StrictStr, Quantity], Field(max_length=16), WITHOUT_NULLS]


class Resources(WireModel):
    """Requests and limits of one container, as in a pod. GPUs are not written here: `gpusPerNode` says them."""

    requests: ResourceMap = Field(default_factory=dict)
    limits: ResourceMap = Field(default_factory=dict)


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


class KeyReference(WireModel):
    """One key of a Secret or ConfigMap in the job's namespace."""

    name: DnsName
    key: FileKey
    optional: Flag = False


class EnvSource(WireModel):
    """Where a variable's value comes from; exactly one."""

    secret_key_ref: KeyReference | None = None
    config_map_key_ref: KeyReference | None = None


class EnvVar(WireModel):
    """An environment variable of all pods of the job."""

    name: EnvName
    value: Annotated[StrictStr, Field(max_length=4096)] | None = None
    """`$(NAME)` is replaced by the value of an earlier entry; `$$` is `$`. `rljob run` does the same, with what is
    exported in place of Secrets and ConfigMaps."""
    value_from: EnvSource | None = None


class ObjectReference(WireModel):
    """A Secret or ConfigMap in the job's namespace."""

    name: DnsName
    optional: Flag = False


class EnvFrom(WireModel):
    """All keys of a Secret or ConfigMap as environment variables; exactly one of the two."""

    prefix: EnvName | None = None
    secret_ref: ObjectReference | None = None
    config_map_ref: ObjectReference | None = None


class LocalObjectReference(WireModel):
    """A ConfigMap or Secret in the job's namespace, by its name."""

    name: DnsName


class VolumeType(StrEnum):
    """One of the blocks below, of the same name, says the rest."""

    PERSISTENT_VOLUME_CLAIM = "PersistentVolumeClaim"
    CONFIG_MAP = "ConfigMap"
    SECRET = "Secret"
    EMPTY_DIR = "EmptyDir"


class ClaimVolume(WireModel):
    """A PersistentVolumeClaim in the job's namespace."""

    claim_name: DnsName


class EmptyDirVolume(WireModel):
    """Scratch space of one pod, lost with it."""

    size_limit: Quantity | None = None


class Volume(WireModel):
    """A volume and the place where all pods of the job see it."""

    name: DnsLabel
    mount_path: AbsolutePath
    read_only: Flag = False
    sub_path: LongText | None = None
    type: VolumeType
    persistent_volume_claim: ClaimVolume | None = None
    config_map: LocalObjectReference | None = None
    secret: LocalObjectReference | None = None
    empty_dir: EmptyDirVolume | None = None
