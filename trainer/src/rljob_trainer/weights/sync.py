"""Hands the trained weights to a rollout engine in the same process."""

from __future__ import annotations

import torch

from rljob_trainer.engines.rollout.base import RolloutEngine
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.models.weight_conversion import HubNames, float32_names
from rljob_trainer.weights.buckets import whole_tensors


def sync_weights(source: TrainEngine, target: RolloutEngine, dtype: torch.dtype, policy_version: int) -> None:
    """Collective. After it the target generates with the source's weights, in `dtype`."""
    shards = dict(source.named_shards())
    weights = whole_tensors(shards.items(), dtype, kept=float32_names(source.language_model, shards))
    if target.takes_hub_names:
        weights = HubNames(source.language_model).stream(weights, list(shards))
    target.update_weights(weights, policy_version)
