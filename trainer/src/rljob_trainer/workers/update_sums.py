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
    ENTROPY,
    KL_LOSS,
    LOGPROB_DIFF_MAX,
    LOGPROB_DIFF_MEAN,
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
        self.largest_difference: Tensor | None = None

    def add(
        self, *, policy_loss: Tensor, entropy_R: Tensor | None, difference_R: Tensor, others: Mapping[str, Tensor]
    ) -> None:
        """Adds one micro-batch. `policy_loss` is this rank's part of a mini-batch's loss, 0-d."""
        self.num_tokens += len(difference_R)
        self._add(POLICY_LOSS, policy_loss)
        if entropy_R is not None:
            self._add(ENTROPY, entropy_R.detach().sum())
        self._add(LOGPROB_DIFF_MEAN, difference_R.sum())
        for name, value in others.items():
            self._add(ACTOR_PREFIX + name, value)
        if len(difference_R):
            largest = difference_R.max()
            before = self.largest_difference
            self.largest_difference = largest if before is None else torch.maximum(before, largest)

    def add_kl(self, kl_R: Tensor) -> None:
        """Adds the KL to the reference of one micro-batch."""
        self.num_kl_tokens += len(kl_R)
        self._add(KL_LOSS, kl_R.sum())

    def reduced(self, engine: TrainEngine, num_updates: int) -> dict[str, float]:
        """Collective. Metrics of the whole batch, equal on all ranks. A rank without tokens has none of the sums; those
        of the others are reported."""
        names = engine.names_over_ranks([*self.sums, POLICY_LOSS, LOGPROB_DIFF_MEAN])
        zero = torch.zeros((), dtype=torch.float64, device=engine.device)
        counts = torch.tensor([self.num_tokens, self.num_kl_tokens], dtype=torch.float64, device=engine.device)
        mine = torch.cat([counts, *(self.sums.get(name, zero).reshape(1) for name in names)])
        largest = zero if self.largest_difference is None else self.largest_difference.double()
        num_tokens, num_kl_tokens, *sums = engine.sum_over_ranks(mine).tolist()
        counted = {POLICY_LOSS: float(num_updates), KL_LOSS: num_kl_tokens}
        metrics = {
            name: value / max(1.0, counted.get(name, num_tokens)) for name, value in zip(names, sums, strict=True)
        }
        metrics[LOGPROB_DIFF_MAX] = float(engine.max_over_ranks(largest).item())
        return metrics

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value
