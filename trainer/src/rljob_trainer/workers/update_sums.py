"""Adds up what the updates of one training step are reported by, over micro-batches, mini-batches and ranks.

The sums stay on the device until the step's end: reading one of them would make the host wait for the device.

Legend: R response tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.observability.metrics import (
    CORRECTION_BOUNDED,
    CORRECTION_MEAN,
    CORRECTION_SAMPLE_SIZE,
    ENTROPY,
    KL_LOSS,
    POLICY_LOSS,
)

ACTOR_PREFIX = "actor/"
"""Before the names of a loss's own sums."""


class UpdateSums:
    """Sums over the response tokens of this rank."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_kl_tokens = 0
        self.sums: dict[str, Tensor] = {}

    def add(
        self, *, num_tokens: int, policy_loss: Tensor, entropy_R: Tensor | None, others: Mapping[str, Tensor]
    ) -> None:
        """Adds one micro-batch. `policy_loss` is this rank's part of a mini-batch's loss, 0-d."""
        self.num_tokens += num_tokens
        self._add(POLICY_LOSS, policy_loss)
        if entropy_R is not None:
            self._add(ENTROPY, entropy_R.detach().sum())
        for name, value in others.items():
            self._add(ACTOR_PREFIX + name, value)

    def add_weights(self, weights_R: Tensor, max_ratio: float) -> None:
        """Adds what the policy losses of one micro-batch were multiplied by."""
        self._add(CORRECTION_MEAN, weights_R.sum())
        self._add(CORRECTION_SAMPLE_SIZE, weights_R.double().square().sum())
        # A ratio itself is never 0.
        self._add(CORRECTION_BOUNDED, ((weights_R == 0) | (weights_R == max_ratio)).sum())

    def add_kl(self, kl_R: Tensor) -> None:
        """Adds the KL to the reference of one micro-batch."""
        self.num_kl_tokens += len(kl_R)
        self._add(KL_LOSS, kl_R.sum())

    def reduced(self, engine: TrainEngine, num_updates: int) -> dict[str, float]:
        """Collective. Metrics of the whole batch, equal on all ranks. A rank without tokens has none of the sums; those
        of the others are reported."""
        names = engine.names_over_ranks([*self.sums, POLICY_LOSS])
        zero = torch.zeros((), dtype=torch.float64, device=engine.device)
        counts = torch.tensor([self.num_tokens, self.num_kl_tokens], dtype=torch.float64, device=engine.device)
        mine = torch.cat([counts, *(self.sums.get(name, zero).reshape(1) for name in names)])
        num_tokens, num_kl_tokens, *sums = engine.sum_over_ranks(mine).tolist()
        counted = {POLICY_LOSS: float(num_updates), KL_LOSS: num_kl_tokens}
        metrics = {
            name: value / max(1.0, counted.get(name, num_tokens)) for name, value in zip(names, sums, strict=True)
        }
        if CORRECTION_SAMPLE_SIZE in metrics:
            mean_of_squares = metrics[CORRECTION_SAMPLE_SIZE]
            metrics[CORRECTION_SAMPLE_SIZE] = metrics[CORRECTION_MEAN] ** 2 / (mean_of_squares or 1.0)
        return metrics

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value
