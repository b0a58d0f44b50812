"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import MAX_NUMBER, Count, DecayRate, FiniteNumber, NonNegativeNumber, PositiveNumber


class OptimizerType(StrEnum):
    """Optimizers that exist in this version."""

    ADAMW = "AdamW"


class Schedule(StrEnum):
    """Learning rate after the warm-up, over the remaining training steps; all updates of one step share it."""

    CONSTANT = "Constant"
    LINEAR = "Linear"
    """Falls to 0."""
    COSINE = "Cosine"
    """Falls to 0 along half a cosine."""


class Optimizer(WireModel):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) with a linear warm-up and gradient clipping."""

    type: OptimizerType = OptimizerType.ADAMW
    learning_rate: PositiveNumber = 1e-6
    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: Annotated[FiniteNumber, Field(ge=1e-30, le=MAX_NUMBER)] = 1e-8
    """Added to the root of the second moment; much less than the least would be 0 as float32."""
    weight_decay: NonNegativeNumber = 0.01
    warmup_steps: Count = 0
    """Training steps over which the learning rate rises linearly from learningRate / warmupSteps."""
    schedule: Schedule = Schedule.CONSTANT
    max_gradient_norm: PositiveNumber = 1.0
    """Global norm above which gradients are scaled down."""
