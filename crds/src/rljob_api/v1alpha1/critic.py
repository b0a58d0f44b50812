"""The critic of algorithms that have one: which model it is, and how it learns."""

from __future__ import annotations

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import Count, Flag, LongText, NonNegativeNumber, PositiveNumber, ShortText
from rljob_api.v1alpha1.model import TrainOffload
from rljob_api.v1alpha1.optimizer import Optimizer


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
