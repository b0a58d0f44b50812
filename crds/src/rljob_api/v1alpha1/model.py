"""Which models are trained, the policy and its critic, and in which precision."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.rule import LOCAL_SOURCE, cel_text, revision_rule, rule
from rljob_api.scalars import (
    Count,
    DecayRate,
    Flag,
    Integer,
    LongText,
    NonNegativeNumber,
    PositiveCount,
    PositiveNumber,
    ShortText,
)
from rljob_api.v1alpha1.optimizer import Optimizer

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


class CriticModel(WireModel):
    """The critic at step 0: a language model whose output head gives way to one that gives a single number."""

    source: LongText | None = None
    """As training.model.source, which it is when unset. Must have the same tokens. A model that was trained to give
    numbers (a sequence or token classifier with one label) keeps its head; else the head begins with zeros."""
    revision: ShortText | None = None
    """As training.model.revision; only beside `source`."""
    gradient_checkpointing: Flag = False
    """Recompute activations in the backward pass."""
    offload: TrainOffload = Field(default_factory=TrainOffload)


class CriticOptimizer(Optimizer):
    """As that of the policy, with another learning rate where none is given."""

    learning_rate: PositiveNumber = 1e-5


class Critic(WireModel):
    """For an advantage that needs values (GAE). It learns from the same mini-batches as the policy, in the same
    precision, and its weights are all trained. It is part of checkpoints, and not of the export."""

    model: CriticModel = Field(default_factory=CriticModel)
    optimizer: CriticOptimizer = Field(default_factory=CriticOptimizer)
    warmup_steps: Count = 0
    """Steps at the beginning in which the critic alone is trained. The policy's learning rate takes its course over the
    steps after them."""
    value_clip_range: NonNegativeNumber = 0.5
    """How far a value may move from that before the update before its loss is held (Huang et al. 2022, detail 9), in
    units of the reward; 0 for no bound."""


MODEL_RULES = (
    revision_rule(Model, "source", lambda model: (model.source, model.revision)),
    rule(
        Model,
        "Model.gradientCheckpointingEveryNthLayer",
        field=".gradientCheckpointingEveryNthLayer",
        cel="self.gradientCheckpointing || self.gradientCheckpointingEveryNthLayer == 1",
        wrong="no layer's activations are recomputed without gradientCheckpointing",
        advice="write gradientCheckpointing: true, or remove this field",
        holds=lambda model: model.gradient_checkpointing or model.gradient_checkpointing_every_nth_layer == 1,
    ),
    rule(
        CriticModel,
        "CriticModel.revision",
        field=".revision",
        cel=f"!has(self.revision) || (has(self.source) && !self.source.matches({cel_text(LOCAL_SOURCE)}))",
        wrong="a revision needs a Hugging Face repository beside it, in source",
        advice="remove the revision, or name the repository",
        holds=lambda model: (
            model.revision is None or (model.source is not None and re.search(LOCAL_SOURCE, model.source) is None)
        ),
    ),
)
