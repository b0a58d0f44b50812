"""Checkpoints and the export of the trained model: contents, frequency and storage."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictStr

from rljob_api.base import WireModel
from rljob_api.rule import exactly_one_rule, rule, sub_path_rule
from rljob_api.scalars import (
    EVALUATION_METRIC,
    BucketKey,
    BucketName,
    DnsName,
    EndpointUrl,
    Flag,
    LongText,
    PositiveCount,
    RegionName,
)


class Resume(StrEnum):
    """Whether a new attempt resumes from a checkpoint."""

    AUTO = "Auto"
    """Resume from the newest complete checkpoint; start at step 0 if there is none."""
    NEVER = "Never"
    """Start at step 0. An attempt that finds a checkpoint fails, and so does the job. So a retry also fails if an
    earlier attempt has saved a checkpoint."""


class ExportHuggingFace(StrEnum):
    """When the policy is exported to a folder that `AutoModelForCausalLM.from_pretrained` can load."""

    FINAL = "Final"
    """After the last step."""
    NEVER = "Never"


class ExportDtype(StrEnum):
    """Precision of the exported weights."""

    AUTO = "Auto"
    """The precision of the weights in the model's source."""
    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"


class KeepBestMode(StrEnum):
    """Which value of a metric is the best."""

    MAX = "Max"
    MIN = "Min"


class KeepBest(WireModel):
    """Keeps the checkpoints with the best values of a metric of an evaluation, and exports the best one.

    An evaluation with a new best value saves a checkpoint at its step. Step 0 does not count."""

    metric: Annotated[StrictStr, Field(max_length=128, pattern=EVALUATION_METRIC)]
    """Name of the metric, for example `eval/heldout/greedy`."""
    mode: KeepBestMode = KeepBestMode.MAX
    count: PositiveCount = 1
    """Number of best checkpoints that are kept in addition to `keep`."""


class S3Storage(WireModel):
    """A bucket of S3, or of a store with the same API that supports conditional writes."""

    bucket: BucketName
    """Name of the bucket."""
    prefix: BucketKey | None = None
    """Folder within the bucket, for example `team/run-1`; namespace/name of the job when unset."""
    endpoint: EndpointUrl | None = None
    """URL of the store, for example `http://minio.storage:9000`; AWS when unset."""
    region: RegionName | None = None
    """Region of the bucket; us-east-1 when unset."""
    secret: DnsName | None = None
    """Name of a Secret with the keys AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and optionally AWS_SESSION_TOKEN. When
    unset, the identity of the pods is used."""


class CheckpointStorage(WireModel):
    """Storage that every pod of the job can read and write; set either persistentVolumeClaim or s3. `rljob run` uses a
    local run folder instead, or the bucket with `--bucket`."""

    persistent_volume_claim: DnsName | None = None
    """Name of a PersistentVolumeClaim with access mode ReadWriteMany."""
    sub_path: LongText | None = None
    """Folder within the claim, for example `team/run-1`; the job's name when unset."""
    s3: S3Storage | None = None


class Checkpoint(WireModel):
    """Checkpoints of the training state, from which a new attempt resumes. A checkpoint is written completely or not at
    all.

    It contains the trainable weights (with model.lora the adapters only) and the optimizer state in float32, whatever
    the model's dtype, so that a resumed run continues from the same numbers. On CPUs the steps of a resumed run are
    bitwise the same as those of an uninterrupted run, except with loadBalancing: Dynamic, refill: Continuous or
    keepFinishedGroups."""

    storage: CheckpointStorage | None = None
    """Shared storage of checkpoints and results. Required on a cluster."""
    every_steps: PositiveCount = 20
    """Save a checkpoint after every n-th step. The trainer also saves one after the last step, and when it is
    stopped."""
    keep: PositiveCount = 3
    """Number of checkpoints to keep; older ones are deleted."""
    keep_best: KeepBest | None = None
    """The best checkpoints, which are kept, too."""
    keep_finished_groups: Flag = False
    """If a stop interrupts a step, save the responses of its finished groups for the next attempt.

    The repeated step has the same first batch of prompts and the same seeds, but not the same bits. So with dynamic
    sampling the replacement prompts may differ."""
    resume: Resume = Resume.AUTO
    export_hugging_face: ExportHuggingFace = ExportHuggingFace.FINAL
    export_dtype: ExportDtype = ExportDtype.AUTO
    """Precision of the exported weights. Auto: the precision of the weights in the model's source."""


CHECKPOINT_RULES = (
    sub_path_rule(CheckpointStorage, lambda storage: storage.sub_path),
    exactly_one_rule(
        CheckpointStorage,
        ("persistent_volume_claim", "s3"),
        lambda storage: (storage.persistent_volume_claim, storage.s3),
    ),
    rule(
        CheckpointStorage,
        "CheckpointStorage.subPathOfClaim",
        field=".subPath",
        cel="!has(self.subPath) || has(self.persistentVolumeClaim)",
        wrong="is a folder within a claim, but there is no persistentVolumeClaim",
        advice="remove it; the folder within a bucket is s3.prefix",
        holds=lambda storage: storage.sub_path is None or storage.persistent_volume_claim is not None,
    ),
)
