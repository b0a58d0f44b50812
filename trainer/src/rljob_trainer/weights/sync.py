"""Copies the weights of a training engine to the rollout engine in the same process."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rljob_trainer.engines.rollout.base import AdapterEngine, RolloutEngine
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.lora import AdapterPair, AdapterSettings, MergeError, adapter_pairs, merged_weight
from rljob_trainer.models.weight_conversion import HubNames, float32_names
from rljob_trainer.weights.buckets import whole_tensors


def sync_weights(
    source: TrainEngine, target: RolloutEngine, dtype: torch.dtype, policy_version: int, *, knows_base: bool = False
) -> float | None:
    """Collective. Afterwards the target generates with the source's weights, in `dtype` (a few tensors that the model
    needs in float32 are sent in float32). Returns how much of the adapters rounding has lost (see MergeError); None
    if no adapters were merged, or if `dtype` is float32.

    `knows_base`: whether the target still has the source's weights without adapters. If it has, and the job sends
    adapters separately, only the adapters are sent."""
    adapters = source.settings.adapters
    if adapters is None or not adapters.are_sent_separately:
        error = None if adapters is None or dtype is torch.float32 else MergeError()
        weights = _whole_model(source, target, dtype, is_merged=adapters is not None, error=error)
        target.update_weights(weights, policy_version)
        return None if error is None else error.fraction()
    assert isinstance(target, AdapterEngine), "the job's engine does not support adapters"
    if not knows_base:
        target.update_weights(_whole_model(source, target, dtype, is_merged=False), policy_version)
    target.update_adapter(whole_adapters(source), adapters.lora, policy_version)
    return None


def _whole_model(
    source: TrainEngine,
    target: RolloutEngine,
    dtype: torch.dtype,
    *,
    is_merged: bool,
    error: MergeError | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    shards = dict(source.named_shards())
    as_float32 = float32_names(source.language_model, shards)
    adapters = source.settings.adapters
    if is_merged and adapters is not None:
        weights = merged_tensors(source, adapters, dtype, as_float32, error)
    else:
        weights = whole_tensors(shards.items(), dtype, as_float32=as_float32)
    if not target.takes_hub_names:
        return weights
    names = HubNames(source.language_model)
    return names.stream(weights, list(shards), whole_experts=target.takes_whole_experts)


def merged_tensors(
    source: TrainEngine,
    adapters: AdapterSettings,
    dtype: torch.dtype,
    as_float32: frozenset[str],
    error: MergeError | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Collective. Yields the source's whole tensors as `whole_tensors` does, with the adapters merged into them. The
    source is not changed. Adds to `error` what rounding loses of the adapters.

    Tensors are merged one at a time, in float32, so this needs no second whole model in memory."""
    pairs = adapter_pairs(source.named_adapters())
    adapter_names = {name for pair in pairs.values() for name in (pair.first_name, pair.second_name)}
    matrices: dict[str, torch.Tensor] = {}
    for name, tensor in whole_tensors(
        _adapters_before_weights(source, pairs), dtype, as_float32=as_float32 | adapter_names
    ):
        if name in adapter_names:
            matrices[name] = tensor
        elif pair := pairs.get(name):
            first, second = matrices.pop(pair.first_name), matrices.pop(pair.second_name)
            yield name, merged_weight(tensor, first, second, adapters.scaling, error)
        else:
            yield name, tensor


def whole_adapters(source: TrainEngine) -> dict[str, torch.Tensor]:
    """Collective. All adapters as whole float32 tensors, by their names in peft's files. The tensors are copies, which
    the caller may keep and change."""
    return {name: tensor.clone() for name, tensor in whole_tensors(source.named_adapters(), torch.float32)}


def _adapters_before_weights(source: TrainEngine, pairs: dict[str, AdapterPair]) -> Iterator[tuple[str, torch.Tensor]]:
    """The source's shards, with the adapter of each adapted weight directly before the weight."""
    for name, tensor in source.named_shards():
        if pair := pairs.get(name):
            yield pair.first_name, pair.first
            yield pair.second_name, pair.second
        yield name, tensor
