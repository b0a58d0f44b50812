"""What a train engine is built from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rljob_api.v1alpha1.optimizer import Optimizer as OptimizerSpec
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.offload import NO_OFFLOAD, OffloadSettings
from rljob_trainer.engines.train.output_head import Head


@dataclass(frozen=True)
class TrainEngineSettings:
    """What an engine is built from. `compute_dtype` is that of the passes; `optimizer` is None for a frozen model."""

    model_folder: Path
    device: torch.device
    compute_dtype: torch.dtype
    gradient_checkpointing: bool
    max_tokens_per_micro_batch: int
    """Of each rank."""
    optimizer: OptimizerSpec | None
    layout: ParallelLayout | None = None
    """None: all ranks of the default process group hold the model together."""
    adapters: AdapterSettings | None = None
    """What is trained in the place of the model's own weights."""
    gradient_checkpointing_every_nth_layer: int = 1
    offload: OffloadSettings = NO_OFFLOAD
    role: str = "actor"
    """Whose model it is, for messages."""
    offload_field: str = "spec.training.model.offload"
    """Where the job says what leaves the device, for messages."""
    head: Head = Head.TOKENS
    defers_reduction: bool = False
    """Gradients are reduced with the last micro-batch of an update alone; until then each rank has whole ones."""
