"""Which model is trained, and in which precision."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import Flag, LongText, PositiveCount, ShortText


class Dtype(StrEnum):
    """Precision of the forward and backward pass. Master weights and optimizer state are always 32 bit."""

    AUTO = "Auto"
    """BFloat16 on GPUs, Float32 on CPUs."""
    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"


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
    gradient_checkpointing_every_nth_layer: PositiveCount = 1
    """Only those of every n-th layer, from the first one on: between all and none in memory and in time. Needs
    `gradientCheckpointing`; at most the model's layers."""
