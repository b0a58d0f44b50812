"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import MAX_NUMBER, Count, DecayRate, FiniteNumber, NonNegativeNumber, PositiveNumber


class OptimizerType(StrEnum):
    """The optimization algorithm."""

    ADAMW = "AdamW"


class Schedule(StrEnum):
    """Learning rate after the warm-up, over the remaining steps. All updates of one step have the same rate."""

    CONSTANT = "Constant"
    """Stays at learningRate."""
    LINEAR = "Linear"
    """Decreases linearly to 0."""
    COSINE = "Cosine"
    """Decreases to 0 along half a cosine."""


class Optimizer(WireModel):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) with a linear warm-up and gradient clipping."""

    type: OptimizerType = OptimizerType.ADAMW
    learning_rate: PositiveNumber = 1e-6
    """Learning rate after the warm-up."""
    beta1: DecayRate = 0.9
    """Decay rate of the first moment (mean of the gradients)."""
    beta2: DecayRate = 0.999
    """Decay rate of the second moment (mean of the squared gradients)."""
    epsilon: Annotated[FiniteNumber, Field(ge=1e-30, le=MAX_NUMBER)] = 1e-8
    """Number that is added to the square root of the second moment. At least 1e-30, because much smaller numbers are 0
    in float32."""
    weight_decay: NonNegativeNumber = 0.01
    """Coefficient of decoupled weight decay: each update multiplies the weights by 1 - learning rate x weightDecay."""
    warmup_steps: Count = 0
    """Number of training steps in which the learning rate rises linearly from learningRate / warmupSteps to
    learningRate."""
    schedule: Schedule = Schedule.CONSTANT
    max_gradient_norm: PositiveNumber = 1.0
    """Largest L2 norm of all gradients together; larger gradients are scaled down to it (gradient clipping)."""
