"""Numbers of all data-parallel ranks of an engine, and what the updates of one training step are reported by.

The sums of a step stay on the device until its end: reading one of them would make the host wait for the device.
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
    """`Reduce` over the data-parallel ranks of an engine."""

    def __init__(self, engine: TrainEngine) -> None:
        self.sum = engine.sum_over_ranks
        self.max = engine.max_over_ranks


class UpdateSums:
    """Sums over the response tokens of this rank, by the names of metrics; over micro-batches, mini-batches, and at
    last over ranks."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.sums: dict[str, Tensor] = {}
        self.largest: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor], num_tokens: int = 0) -> None:
        """Adds 0-d sums, and as many tokens as were not counted before."""
        self.num_tokens += num_tokens
        for name, value in sums.items():
            value = value.detach().double()
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add_largest(self, name: str, value: Tensor) -> None:
        """Of this metric the largest 0-d value counts."""
        value = value.detach().double()
        self.largest[name] = torch.maximum(self.largest[name], value) if name in self.largest else value

    def reduced(
        self, engine: TrainEngine, always: Sequence[str] = (), counts: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Collective. Means over all tokens of all ranks, or of a metric in `counts` over so many; equal on all ranks.
        A rank without tokens has none of the sums; those of the others are reported. Those in `always` are there also
        where no rank has any."""
        names = engine.names_over_ranks([*self.sums, *always])
        zero = torch.zeros((), dtype=torch.float64, device=engine.device)
        mine = torch.stack([zero + self.num_tokens, *(self.sums.get(name, zero) for name in names)])
        num_tokens, *sums = engine.sum_over_ranks(mine).tolist()
        divisors = counts or {}
        return {name: value / max(1.0, divisors.get(name, num_tokens)) for name, value in zip(names, sums, strict=True)}

    def reduced_largest(self, engine: TrainEngine, name: str) -> float:
        """Collective. Of a metric given to `add_largest`; 0 where no rank has one."""
        zero = torch.zeros((), dtype=torch.float64, device=engine.device)
        return float(engine.max_over_ranks(self.largest.get(name, zero)).item())


def token_denominators(mini_batch: TokenBatch, engine: TrainEngine) -> Denominators:
    """Collective. Counts of the mini-batch over all workers."""
    mine = count_denominators(Segments.of(mini_batch.response_lengths, torch.device("cpu")))
    counts = torch.tensor([mine.num_tokens, mine.num_sequences], dtype=torch.float64)
    return Denominators(*engine.sum_over_ranks(counts).tolist())
