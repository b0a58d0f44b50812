"""Builds the volumes of a job's pods and their mounts in the containers."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import JsonValue

from rljob_api.constants import POD_CACHE_FOLDER, POD_CODE_FOLDER, POD_STORAGE_FOLDER
from rljob_api.v1alpha1.pod_environment import Volume
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.manifests.ownership import JobIdentity, Manifest

RAY_FOLDER = "/tmp/ray"
"""Ray's folder for its files in a pod; it contains `constants.POD_RAY_LOG_FOLDER`."""


@dataclass(frozen=True)
class MountedVolume:
    """A volume of a pod and its mount in containers."""

    source: Manifest
    """Entry of the pod's `volumes`."""
    mount: Manifest
    """Entry of a container's `volumeMounts`."""


def pod_volumes(job: JobIdentity, spec: RLJobSpec) -> list[MountedVolume]:
    """The volumes of head and worker pods: storage, cache, `code` if the job has it, and the job's `volumes`.

    A claim that is mounted several times is one volume: a pod with two volumes of one claim never starts
    (https://github.com/kubernetes/kubernetes/issues/132921)."""
    volumes = [
        storage_volume(job, spec),
        _mounted("rljob-cache", {"emptyDir": {}}, POD_CACHE_FOLDER),
        *_code_volume(spec),
        *(_mounted_volume(volume) for volume in spec.volumes),
    ]
    first: dict[str, MountedVolume] = {}
    for index, volume in enumerate(volumes):
        claim = volume.source.get("persistentVolumeClaim")
        if isinstance(claim, dict):
            shared = first.setdefault(str(claim["claimName"]), volume)
            volumes[index] = MountedVolume(shared.source, {**volume.mount, "name": shared.source["name"]})
    return volumes


def storage_volume(job: JobIdentity, spec: RLJobSpec) -> MountedVolume:
    """The job's folder in the claim `checkpoint.storage`. With a bucket, a folder of the pod: the trainer copies the
    run's files into the bucket."""
    storage = spec.checkpoint.storage
    assert storage is not None, "job_checks rejects a job without storage"
    if storage.s3 is not None:
        return _mounted("rljob-storage", {"emptyDir": {}}, POD_STORAGE_FOLDER)
    source: Manifest = {"persistentVolumeClaim": {"claimName": storage.persistent_volume_claim}}
    return _mounted("rljob-storage", source, POD_STORAGE_FOLDER, sub_path=storage.sub_path or job.name)


def shared_memory_volume(size: str) -> MountedVolume:
    """/dev/shm, for Ray's object store and NCCL. KubeRay adds such a volume only if the pod has none."""
    return _mounted("rljob-shm", {"emptyDir": {"medium": "Memory", "sizeLimit": size}}, "/dev/shm")


def ray_volume(*, read_only: bool = False) -> MountedVolume:
    """Ray's files in the head pod, shared by its two containers."""
    return _mounted("rljob-ray", {"emptyDir": {}}, RAY_FOLDER, read_only=read_only)


def sources(volumes: list[MountedVolume]) -> list[JsonValue]:
    """The volumes for the pod spec, each once."""
    by_name = {str(volume.source["name"]): volume.source for volume in volumes}
    return list(by_name.values())


def mounts(volumes: list[MountedVolume]) -> list[JsonValue]:
    """The volume mounts for a container."""
    return [volume.mount for volume in volumes]


def _code_volume(spec: RLJobSpec) -> list[MountedVolume]:
    """The volume with the job's `code`; empty without `code`, and for code in the image."""
    if spec.code is None or spec.code.image_path is not None:
        return []
    if spec.code.config_map is not None:
        source: Manifest = {"configMap": {"name": spec.code.config_map}}
    else:
        source = {"persistentVolumeClaim": {"claimName": spec.code.persistent_volume_claim}}
    return [_mounted("rljob-code", source, POD_CODE_FOLDER, read_only=True)]


def _mounted_volume(volume: Volume) -> MountedVolume:
    """A volume of the job's `volumes`."""
    return _mounted(
        volume.name, _source(volume), volume.mount_path, read_only=volume.read_only, sub_path=volume.sub_path
    )


def _source(volume: Volume) -> Manifest:
    """The source of a volume of the job. Validation of `Volume` ensures that exactly one source is set."""
    if volume.persistent_volume_claim is not None:
        return {"persistentVolumeClaim": {"claimName": volume.persistent_volume_claim.claim_name}}
    if volume.config_map is not None:
        return {"configMap": {"name": volume.config_map.name}}
    if volume.secret is not None:
        return {"secret": {"secretName": volume.secret.name}}
    assert volume.empty_dir is not None
    limit = volume.empty_dir.size_limit
    return {"emptyDir": {} if limit is None else {"sizeLimit": limit}}


def _mounted(
    name: str, source: Manifest, path: str, *, read_only: bool = False, sub_path: str | None = None
) -> MountedVolume:
    mount: Manifest = {"name": name, "mountPath": path}
    if read_only:
        mount["readOnly"] = True
    if sub_path is not None:
        mount["subPath"] = sub_path
    return MountedVolume(source={"name": name, **source}, mount=mount)
