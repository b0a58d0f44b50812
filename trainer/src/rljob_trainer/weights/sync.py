"""Hands the trained weights to a rollout engine in the same process."""

from __future__ import annotations

import torch

from rljob_trainer.engines.rollout.base import RolloutEngine
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.weights.buckets import whole_tensors


def sync_weights(source: TrainEngine, target: RolloutEngine, dtype: torch.dtype, policy_version: int) -> None:
    """Collective. After it the target generates with the source's weights, in `dtype`."""
    target.update_weights(whole_tensors(source.named_shards(), dtype), policy_version)
