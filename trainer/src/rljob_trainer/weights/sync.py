"""Hands the trained weights to a rollout engine in the same process."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rljob_trainer.engines.rollout.base import AdapterEngine, RolloutEngine
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.lora import AdapterPair, AdapterSettings, adapter_pairs, merged_weight
from rljob_trainer.models.weight_conversion import HubNames, float32_names
from rljob_trainer.weights.buckets import whole_tensors


def sync_weights(
    source: TrainEngine, target: RolloutEngine, dtype: torch.dtype, policy_version: int, *, knows_base: bool = False
) -> None:
    """Collective. After it the target generates with the source's weights, in `dtype`.

    `knows_base` says that the target has had weights of this source and has not forgotten them: where adapters go by
    themselves, it then needs those alone."""
    adapters = source.settings.adapters
    if adapters is None or not adapters.go_alone:
        target.update_weights(_whole_model(source, target, dtype, is_merged=adapters is not None), policy_version)
        return
    assert isinstance(target, AdapterEngine), "the job's engine takes no adapters"
    if not knows_base:
        target.update_weights(_whole_model(source, target, dtype, is_merged=False), policy_version)
    target.update_adapter(whole_adapters(source), adapters.lora, policy_version)


def _whole_model(
    source: TrainEngine, target: RolloutEngine, dtype: torch.dtype, *, is_merged: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    shards = dict(source.named_shards())
    kept = float32_names(source.language_model, shards)
    adapters = source.settings.adapters
    if is_merged and adapters is not None:
        weights = merged_tensors(source, adapters, dtype, kept)
    else:
        weights = whole_tensors(shards.items(), dtype, kept=kept)
    return HubNames(source.language_model).stream(weights, list(shards)) if target.takes_hub_names else weights


def merged_tensors(
    source: TrainEngine, adapters: AdapterSettings, dtype: torch.dtype, kept: frozenset[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Collective. As `whole_tensors` of the source's shards, with the adapters added; the source stays as it is.

    One tensor at a time is merged, in 32 bits; what is added to the model's memory is that tensor and its bucket."""
    pairs = adapter_pairs(source.named_adapters())
    parts = {part for pair in pairs.values() for part in (pair.first_name, pair.second_name)}
    held: dict[str, torch.Tensor] = {}
    for name, tensor in whole_tensors(_before_their_weights(source, pairs), dtype, kept=kept | parts):
        if name in parts:
            held[name] = tensor
        elif pair := pairs.get(name):
            first, second = held.pop(pair.first_name), held.pop(pair.second_name)
            yield name, merged_weight(tensor, first, second, adapters.scaling)
        else:
            yield name, tensor


def whole_adapters(source: TrainEngine) -> dict[str, torch.Tensor]:
    """Collective. All adapters whole, in 32 bits, under the names of peft's files; copies, which may be kept and
    changed."""
    return {name: tensor.clone() for name, tensor in whole_tensors(source.named_adapters(), torch.float32)}


def _before_their_weights(source: TrainEngine, pairs: dict[str, AdapterPair]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in source.named_shards():
        if pair := pairs.get(name):
            yield pair.first_name, pair.first
            yield pair.second_name, pair.second
        yield name, tensor
