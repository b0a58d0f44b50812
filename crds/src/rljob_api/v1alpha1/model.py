"""The policy model and the critic: source, precision, adapters, and memory settings."""

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
    ModelSource,
    NonNegativeNumber,
    PositiveCount,
    PositiveNumber,
    ShortText,
)
from rljob_api.v1alpha1.optimizer import Optimizer

MAX_LORA_RANK = 512
"""The largest rank that vLLM supports."""


class Dtype(StrEnum):
    """Precision of the forward and backward pass. Trainable weights and optimizer state are always float32; frozen
    weights, such as the base model of LoRA, have this precision."""

    AUTO = "Auto"
    """BFloat16 on GPUs, Float32 on CPUs."""
    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"


class GradientCheckpointing(StrEnum):
    """Whether activations are recomputed in the backward pass instead of stored: less memory, about a third more
    time."""

    AUTO = "Auto"
    """Always with gradientCheckpointingEveryNthLayer above 1, and on GPUs for models from 1 billion parameters; else
    Never."""
    ALWAYS = "Always"
    NEVER = "Never"


AUTO_CHECKPOINTING_PARAMETERS = 10**9
"""With `Auto`, models from this number of parameters recompute activations on GPUs. Without this, 16,384 tokens of
Qwen3-0.6B already keep 31 GB."""


def select_checkpointing(
    wanted: GradientCheckpointing,
    num_parameters: int,
    every_nth_layer: int = 1,
    *,
    is_cpu: bool,
    is_supported: bool = True,
) -> GradientCheckpointing:
    """ALWAYS or NEVER, for a model with this number of parameters. `every_nth_layer`: the value of the job.
    `is_supported`: whether the model's type can recompute activations."""
    if wanted is not GradientCheckpointing.AUTO:
        return wanted
    pays = is_supported and not is_cpu and num_parameters >= AUTO_CHECKPOINTING_PARAMETERS
    return GradientCheckpointing.ALWAYS if pays or every_nth_layer > 1 else GradientCheckpointing.NEVER


class HeadDtype(StrEnum):
    """Precision of the policy's logits in training and generation. Values and scores are always in float32."""

    MODEL = "Model"
    """That of the model."""
    FLOAT32 = "Float32"
    """Of a model in BFloat16, log-probabilities of trainer and rollout engine agree better. Slows down generation on
    CPUs."""


class Kernels(StrEnum):
    """Which norms and rotary embeddings training uses."""

    PLAIN = "Plain"
    """Those of transformers."""
    LIGER = "Liger"
    """Fused ones of liger-kernel: faster, with less memory. Needs GPUs and the trainer's extra `kernels`."""


class LoraSync(StrEnum):
    """How trained adapters reach the rollout engine."""

    AUTO = "Auto"
    """Adapter with vLLM on GPUs, and in BFloat16 on CPUs. Merged in Float32 on CPUs (where vLLM decodes half as fast
    with adapters), for the HuggingFace engine, and if vLLM cannot apply the model's adapters."""
    ADAPTER = "Adapter"
    """Send only the adapters; the base model stays in the engine. Requires vLLM."""
    MERGED = "Merged"
    """Send the whole model, with the adapters added to its weights. In BFloat16, rounding loses small adapters."""


class Lora(WireModel):
    """Low-rank adapters (LoRA). The base model is frozen, and each target layer gets a trainable product of two small
    matrices. Optimizer state and checkpoints contain the adapters only."""

    rank: Annotated[Integer, Field(ge=1, le=MAX_LORA_RANK)] = 16
    """Inner dimension of the two matrices."""
    alpha: PositiveNumber = 32.0
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    targets: Annotated[tuple[ShortText, ...], Field(min_length=1, max_length=64)] | None = None
    """Names of the linear layers with adapters, in full or by suffix, for example `[q_proj, self_attn.v_proj]`. All
    linear layers of the decoder layers when unset, without the output head."""
    dropout: DecayRate = 0.0
    """Dropout probability of the adapters' inputs during training. Generation and scoring use no dropout."""
    sync: LoraSync = LoraSync.AUTO


class TrainOffload(WireModel):
    """Tensors that are moved from the GPU to host memory while they are not needed. The training result is the same,
    bit by bit; each copy takes time."""

    parameters: Flag = False
    """Offload the parameter shards: those of the policy during generation, those of the critic while the critic is
    idle."""
    gradients: Flag = False
    """Offload accumulated gradients while the next micro-batch is computed. Requires full sharding (see
    roles.actor.shardSize) and roles.actor.deferGradientReduction: false."""
    optimizer: Flag = False
    """Offload the optimizer's moments, except during optimizer steps and while a checkpoint is copied."""


class Offload(TrainOffload):
    """Tensors that are moved from the GPU to host memory while they are not needed. The training result is the same,
    bit by bit; each copy takes time."""

    reference: Flag = False
    """Offload the parameter shards of the reference model while it computes no log-probabilities."""


class Model(WireModel):
    """The policy at step 0. A reference model without `roles.ref.model` has the same weights."""

    source: ModelSource
    """Hugging Face repository (`Qwen/Qwen3-8B`), folder (`/models/qwen3-8b`), `package://<python package>/<path>`, or
    `run://<run folder>` (another run's newest checkpoint).

    `package://` names a folder or a `.gguf` file inside an installed Python package. With `@step-20` at its end, `run://`
    names the checkpoint of step 20."""
    revision: ShortText | None = None
    """Commit, tag or branch of the Hugging Face repository; its default branch when unset."""
    dtype: Dtype = Dtype.AUTO
    gradient_checkpointing: GradientCheckpointing = GradientCheckpointing.AUTO
    gradient_checkpointing_every_nth_layer: PositiveCount = 1
    """Recompute the activations of every n-th layer only, from the first layer on. 2 saves about half as much memory as
    1, and adds about half as much time.

    Not allowed with `gradientCheckpointing: Never`; at most the
    model's number of layers."""
    head_dtype: HeadDtype = HeadDtype.MODEL
    kernels: Kernels = Kernels.PLAIN
    lora: Lora | None = None
    """Train low-rank adapters instead of all weights.

    The export is the merged model, with the adapters in its folder `adapter/`. A reference on the actor's pool without
    a layout or weights of its own is the same model with the adapters disabled, and takes no additional memory."""
    offload: Offload = Field(default_factory=Offload)


class CriticModel(WireModel):
    """The critic at step 0: a language model whose output head is replaced by one with a single output, the value."""

    source: ModelSource | None = None
    """Source of the critic's weights, in the form of training.model.source; the policy's source when unset. Must have
    the policy's tokenizer.

    A sequence or token classifier with one label keeps its head. Other models get a head of zeros."""
    revision: ShortText | None = None
    """Commit, tag or branch of the Hugging Face repository in `source`."""
    gradient_checkpointing: GradientCheckpointing = GradientCheckpointing.AUTO
    offload: TrainOffload = Field(default_factory=TrainOffload)


class CriticOptimizer(Optimizer):
    """The optimizer of the critic: the policy's settings with a higher default learning rate."""

    learning_rate: PositiveNumber = 1e-5
    """Learning rate after the warm-up."""


class ReferenceModel(WireModel):
    """The weights of a reference model, for example those of a teacher. Must have the policy's tokenizer; its
    architecture and size may differ."""

    source: ModelSource
    """Source of the weights, in the form of training.model.source."""
    revision: ShortText | None = None
    """Commit, tag or branch of the Hugging Face repository in `source`."""


class Critic(WireModel):
    """The critic (value model) of an advantage that needs values, such as GAE. All of its weights are trained, on the
    policy's mini-batches and in the policy's precision. Checkpoints contain it; the export does not."""

    model: CriticModel = Field(default_factory=CriticModel)
    optimizer: CriticOptimizer = Field(default_factory=CriticOptimizer)
    warmup_steps: Count = 0
    """Number of steps at the start in which only the critic is trained. The policy's learning-rate schedule starts
    after these steps."""
    value_clip_range: NonNegativeNumber = 0.5
    """Largest change of a value during the updates of one step, in units of the reward. The value loss is clipped if
    the change is larger (Huang et al. 2022, detail 9); 0 disables clipping."""


LATENT_PROJECTION = "kv_b_proj"
"""The layer whose adapters vLLM ignores, because it multiplies the layer's weight into other matrices."""

MODEL_RULES = (
    revision_rule(Model, "source", lambda model: (model.source, model.revision)),
    revision_rule(ReferenceModel, "source", lambda model: (model.source, model.revision)),
    rule(
        Model,
        "Model.gradientCheckpointingEveryNthLayer",
        field=".gradientCheckpointingEveryNthLayer",
        cel="self.gradientCheckpointing != 'Never' || self.gradientCheckpointingEveryNthLayer == 1",
        wrong="would be ignored with gradientCheckpointing: Never",
        advice="set gradientCheckpointing: Always, or remove this field",
        holds=lambda model: (
            model.gradient_checkpointing is not GradientCheckpointing.NEVER
            or model.gradient_checkpointing_every_nth_layer == 1
        ),
    ),
    rule(
        Lora,
        "Lora.latentProjection",
        field=".sync",
        cel="self.sync != 'Adapter' || !has(self.targets)"
        f" || !self.targets.exists(t, ('.' + t).endsWith('.{LATENT_PROJECTION}'))",
        wrong=f"vLLM ignores adapters of {LATENT_PROJECTION}",
        advice=f"set Merged or Auto, or lora.targets without {LATENT_PROJECTION}",
        holds=lambda lora: (
            lora.sync is not LoraSync.ADAPTER
            or LATENT_PROJECTION not in {target.rpartition(".")[2] for target in lora.targets or ()}
        ),
    ),
    rule(
        CriticModel,
        "CriticModel.revision",
        field=".revision",
        cel=f"!has(self.revision) || (has(self.source) && !self.source.matches({cel_text(LOCAL_SOURCE)}))",
        wrong="requires a Hugging Face repository in critic.model.source",
        advice="remove the revision, or set source to the repository",
        holds=lambda model: (
            model.revision is None or (model.source is not None and re.search(LOCAL_SOURCE, model.source) is None)
        ),
    ),
)
