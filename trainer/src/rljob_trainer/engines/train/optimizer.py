"""AdamW, and its learning rate as a function of the training step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from rljob_api.v1alpha1.optimizer import Optimizer as OptimizerSpec
from rljob_api.v1alpha1.optimizer import Schedule


def make_adamw(parameters: Iterable[torch.nn.Parameter], spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over sharded float32 parameters."""
    return torch.optim.AdamW(
        parameters,
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        eps=spec.epsilon,
        weight_decay=spec.weight_decay,
        fused=True,
    )


def learning_rate(spec: OptimizerSpec, step: int, num_steps: int) -> float:
    """The learning rate of training step `step` (from 0) of `num_steps`: a linear warm-up, then either constant or down
    to 0 at the end, as the schedule says."""
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    progress = (step - spec.warmup_steps) / max(1, num_steps - spec.warmup_steps)
    if spec.schedule is Schedule.LINEAR:
        return spec.learning_rate * (1 - progress)
    if spec.schedule is Schedule.COSINE:
        return spec.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    return spec.learning_rate
