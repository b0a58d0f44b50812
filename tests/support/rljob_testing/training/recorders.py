"""Records the gradients and the forward passes of a training engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from rljob_testing.training import replays
from rljob_trainer.engines.train.engine import TrainEngine


@contextmanager
def recorded_gradients(engine: TrainEngine) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Records the whole gradients of each update before they are clipped and applied."""
    updates: list[dict[str, torch.Tensor]] = []
    apply_update = engine.optimizer_step

    def keep(rate: float) -> float:
        shards = ((name, parameter.grad) for name, parameter in engine.model.named_parameters())
        updates.append(replays.whole_copies((name, gradient) for name, gradient in shards if gradient is not None))
        return apply_update(rate)

    engine.optimizer_step = keep  # type: ignore[method-assign,assignment]
    try:
        yield updates
    finally:
        engine.optimizer_step = apply_update  # type: ignore[method-assign]


@dataclass(frozen=True)
class Pass:
    """The inputs of one forward pass of a model."""

    num_tokens: int
    num_rows: int


@contextmanager
def recorded_passes(engine: TrainEngine) -> Iterator[list[Pass]]:
    """Records the forward passes of this rank's model, whose rows are flat."""
    passes: list[Pass] = []

    def note(_module: nn.Module, _arguments: object, named: dict[str, torch.Tensor]) -> None:
        is_first = named["position_ids"] == 0
        passes.append(Pass(named["input_ids"].numel(), int(is_first.sum())))

    decoder = engine.model.language_model.get_decoder()  # type: ignore[operator]
    hook = decoder.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield passes
    finally:
        hook.remove()
