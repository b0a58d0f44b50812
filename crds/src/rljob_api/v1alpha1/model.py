"""Which model is trained, and in which precision."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import Flag, LongText, ShortText


class Dtype(StrEnum):
    """Precision of the forward and backward pass. Master weights and optimizer state are always 32 bit."""

    AUTO = "Auto"
    """BFloat16 on GPUs, Float32 on CPUs."""
    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"


class Offload(WireModel):
    """What leaves the device for the host's memory while nothing needs it. Training stays the same to the last bit;
    each part costs its copies."""

    parameters: Flag = False
    """The actor's shards, while responses are generated."""
    gradients: Flag = False
    """What the micro-batches before have added up, while the next one is computed; only with one replica (see
    roles.actor.shardSize)."""
    optimizer: Flag = False
    """The optimizer's moments, outside of optimizer steps and of copying a checkpoint."""
    reference: Flag = False
    """The reference model's shards, while it does not score."""


class Model(WireModel):
    """The policy at step 0; also the reference policy where a KL term asks for one."""

    source: LongText
    """Hugging Face repository (`Qwen/Qwen3-8B`), a folder, or `package://<python package>/<path>` for a folder or a
    `.gguf` file that ships inside an installed Python package."""
    revision: ShortText | None = None
    """Commit, tag or branch of the repository; only for Hugging Face repositories."""
    dtype: Dtype = Dtype.AUTO
    gradient_checkpointing: Flag = Field(default=False)
    """Recompute activations in the backward pass: less memory, about a third more time."""
    offload: Offload = Field(default_factory=Offload)
