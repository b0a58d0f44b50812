"""What is saved, when and where."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.rule import sub_path_rule
from rljob_api.scalars import DnsName, LongText, PositiveCount


class Resume(StrEnum):
    """Where a new attempt begins."""

    AUTO = "Auto"
    """At the newest complete checkpoint, if there is one."""
    NEVER = "Never"
    """At step 0; refused where checkpoints exist already."""


class ExportHuggingFace(StrEnum):
    """When the policy is written as a folder that `AutoModelForCausalLM.from_pretrained` loads."""

    FINAL = "Final"
    NEVER = "Never"


class ExportDtype(StrEnum):
    """Precision of the exported weights."""

    AUTO = "Auto"
    """That of the weights at the model's source."""
    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"


class CheckpointStorage(WireModel):
    """Storage that every pod of the job can read and write. Locally it is a folder of the run."""

    persistent_volume_claim: DnsName
    sub_path: LongText | None = None
    """Folder within the claim; the job's name when unset."""


class Checkpoint(WireModel):
    """Checkpoints are complete or absent; a new attempt resumes from the newest complete one. They hold master weights
    (with model.lora those of the adapters) and optimizer state as they are in training, in 32 bits whatever the model's
    dtype, because a resumed run goes on from the very same numbers; on CPUs its steps are bit by bit those of a run
    that was not interrupted."""

    storage: CheckpointStorage | None = None
    every_steps: PositiveCount = 20
    """Also after the last step, and when the job is asked to stop."""
    keep: PositiveCount = 3
    """Complete checkpoints that are kept; older ones are deleted."""
    resume: Resume = Resume.AUTO
    export_hugging_face: ExportHuggingFace = ExportHuggingFace.FINAL
    export_dtype: ExportDtype = ExportDtype.AUTO
    """Precision of the exported weights. Auto: that of the weights at the model's source."""


CHECKPOINT_RULES = (sub_path_rule(CheckpointStorage, lambda storage: storage.sub_path),)
