"""Sums over data-parallel ranks: `RankReduce` for algorithms, and the metrics of the updates of one training step.

The sums stay on the device until the end of the step, because reading a sum makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rljob_trainer.algorithms.aggregation import Denominators, count_denominators
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.token_batch import TokenBatch


class RankReduce:
    """Implements `Reduce` (`algorithms`) over the data-parallel ranks of an engine."""

    def __init__(self, engine: TrainEngine) -> None:
        self.sum = engine.sum_over_ranks
        self.max = engine.max_over_ranks


class UpdateSums:
    """Accumulates sums over response tokens by metric name, over the micro-batches and mini-batches of this rank;
    `reduced` then sums over all ranks."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.sums: dict[str, Tensor] = {}
        self.largest: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor], num_tokens: int = 0) -> None:
        """Adds 0-d sums. `num_tokens`: the number of tokens in the sums; 0 if they were already counted."""
        self.num_tokens += num_tokens
        for name, value in sums.items():
            value = value.detach().double()
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add_largest(self, name: str, value: Tensor) -> None:
        """Updates the maximum of this metric with a 0-d value."""
        value = value.detach().double()
        self.largest[name] = torch.maximum(self.largest[name], value) if name in self.largest else value

    def reduced(
        self, engine: TrainEngine, always: Sequence[str] = (), counts: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Collective. The mean of each metric over all tokens of all ranks, equal on all ranks.

        A metric in `counts` is divided by that count instead of the number of tokens. Metrics that only some ranks have
        are included; those in `always` are included, as 0, even if no rank has them."""
        names = engine.names_over_ranks([*self.sums, *always])
        zero = torch.zeros((), dtype=torch.float64, device=engine.device)
        mine = torch.stack([zero + self.num_tokens, *(self.sums.get(name, zero) for name in names)])
        num_tokens, *sums = engine.sum_over_ranks(mine).tolist()
        divisors = counts or {}
        return {name: value / max(1.0, divisors.get(name, num_tokens)) for name, value in zip(names, sums, strict=True)}

    def reduced_largest(self, engine: TrainEngine, name: str) -> float:
        """Collective. The maximum over all ranks of a metric given to `add_largest`; 0 if no rank has a value."""
        zero = torch.zeros((), dtype=torch.float64, device=engine.device)
        return float(engine.max_over_ranks(self.largest.get(name, zero)).item())


def token_denominators(mini_batch: TokenBatch, engine: TrainEngine) -> Denominators:
    """Collective. The numbers of response tokens, and of rows with response tokens, in the mini-batch on all
    workers."""
    mine = count_denominators(Segments.of(mini_batch.response_lengths, torch.device("cpu")))
    counts = torch.tensor([mine.num_tokens, mine.num_sequences], dtype=torch.float64)
    return Denominators(*engine.sum_over_ranks(counts).tolist())
