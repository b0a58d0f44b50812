"""What a job needs on a cluster only, so that neither the schema nor `rljob run` may ask for it."""

from __future__ import annotations

import re

from rljob_api.constants import MIN_RAY_VERSION
from rljob_api.v1alpha1.rule import Violation
from rljob_api.v1alpha1.spec import RLJobSpec

STORAGE_RULE = "RLJobSpec.storageOnCluster"
IMAGE_RULE = "RLJobSpec.imageOnCluster"
RAY_VERSION_RULE = "RLJobSpec.rayVersionOnCluster"
_VERSION = r"\d+\.\d+\.\d+"


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


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))
