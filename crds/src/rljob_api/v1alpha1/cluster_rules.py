"""What a job needs on a cluster only, so that neither the schema nor `rljob run` may ask for it."""

from __future__ import annotations

from rljob_api.v1alpha1.rule import Violation
from rljob_api.v1alpha1.spec import RLJobSpec

STORAGE_RULE = "RLJobSpec.storageOnCluster"
IMAGE_RULE = "RLJobSpec.imageOnCluster"


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
    return tuple(found)
