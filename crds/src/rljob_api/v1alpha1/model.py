"""Which model is trained, and in which precision."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import DecayRate, Flag, Integer, LongText, PositiveCount, PositiveNumber, ShortText

MAX_LORA_RANK = 512
"""What vLLM takes."""


class Dtype(StrEnum):
    """Precision of the forward and backward pass. What is trained and its optimizer state are
    always in 32 bits; a frozen model, the base of adapters too, has this precision."""

    AUTO = "Auto"
    """BFloat16 on GPUs, Float32 on CPUs."""
    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"


class LoraSync(StrEnum):
    """How trained adapters reach the rollout engine."""

    AUTO = "Auto"
    """Adapter on GPUs, Merged on CPUs (vLLM decodes half as fast with adapters there), for models with experts, and for
    the HuggingFace engine."""
    ADAPTER = "Adapter"
    """The adapters alone, next to a base model that stays in vLLM; with vLLM only, and not for models with experts on
    CPUs."""
    MERGED = "Merged"
    """The whole model, with the adapters added to its weights."""


class Lora(WireModel):
    """Low-rank adapters (LoRA): the model's weights stay as they are, and a small product of two matrices is trained
    beside each chosen linear layer. Optimizer state and checkpoints are of the adapters alone."""

    rank: Annotated[Integer, Field(ge=1, le=MAX_LORA_RANK)] = 16
    """Columns of the first matrix, and rows of the second."""
    alpha: PositiveNumber = 32.0
    """The product is multiplied by alpha / rank."""
    targets: Annotated[tuple[ShortText, ...], Field(min_length=1, max_length=64)] | None = None
    """Names of linear layers, or the ends of them (`q_proj`, `self_attn.q_proj`). All linear layers of the decoder's
    layers when unset; the output head is none of them."""
    dropout: DecayRate = 0.0
    """Share of an adapter's inputs that is left out while gradients are computed; generation and scoring see all."""
    sync: LoraSync = LoraSync.AUTO


class TrainOffload(WireModel):
    """What leaves the device for the host's memory while nothing needs it. Training stays the same to the last bit;
    each part costs its copies."""

    parameters: Flag = False
    """The shards of the model in training, while responses are generated; a critic's, while it is not asked."""
    gradients: Flag = False
    """What the micro-batches before have added up, while the next one is computed; only with one replica (see
    roles.actor.shardSize), and without roles.actor.deferGradientReduction."""
    optimizer: Flag = False
    """The optimizer's moments, outside of optimizer steps and of copying a checkpoint."""


class Offload(TrainOffload):
    """The same, and the reference, which has no other place to say it."""

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
    gradient_checkpointing_every_nth_layer: PositiveCount = 1
    """Only those of every n-th layer, from the first one on: between all and none in memory and in time. Needs
    `gradientCheckpointing`; at most the model's layers."""
    lora: Lora | None = None
    """Train adapters instead of all weights. The export is the merged model, with the adapters beside it in `adapter/`.
    A reference on the actor's pool that names no other layout is this model with its adapters off: it takes no
    memory."""
    offload: Offload = Field(default_factory=Offload)
