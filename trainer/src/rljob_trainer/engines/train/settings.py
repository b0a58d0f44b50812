"""The settings of a training engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rljob_api.v1alpha1.model import Kernels
from rljob_api.v1alpha1.optimizer import Optimizer as OptimizerSpec
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.offload import NO_OFFLOAD, OffloadSettings
from rljob_trainer.engines.train.output_head import Head


@dataclass(frozen=True)
class TrainEngineSettings:
    """The settings of a training engine."""

    model_folder: Path
    device: torch.device
    compute_dtype: torch.dtype
    """The dtype of forward and backward passes."""
    gradient_checkpointing: bool
    max_tokens_per_micro_batch: int
    """The token budget of a micro-batch per sequence rank."""
    optimizer: OptimizerSpec | None
    """None: the model is frozen."""
    layout: ParallelLayout | None = None
    """None: the model is sharded over all ranks of the default process group."""
    adapters: AdapterSettings | None = None
    """The LoRA adapters that are trained instead of the model's weights; None: the weights are trained."""
    gradient_checkpointing_every_nth_layer: int = 1
    """With n, only layers 0, n, 2n, ... recompute their activations."""
    has_float32_head: bool = False
    """True: logits have 32 bits, also if `compute_dtype` has 16."""
    kernels: Kernels = Kernels.PLAIN
    offload: OffloadSettings = NO_OFFLOAD
    role: str = "actor"
    """The role of the model, for messages."""
    offload_field: str = "spec.training.model.offload"
    """The job's field that configures offloading, for messages."""
    head: Head = Head.TOKENS
    """What the model computes at a token."""
    defers_reduction: bool = False
    """True: gradients are summed over ranks only with the last micro-batch of an update; until then each rank keeps
    gradients of the whole model."""

    @property
    def has_dropout(self) -> bool:
        """Whether the log-probabilities of an update's passes have the noise of the adapters' dropout."""
        return self.adapters is not None and self.adapters.lora.dropout > 0
