"""Trained adapters on their way to a rollout engine: added to the weights, or by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.lora import AdapterPair, AdapterSettings, adapter_pairs, merged_weight
from rljob_trainer.weights.buckets import whole_tensors


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
