"""Numbers of all data-parallel ranks of an engine."""

from __future__ import annotations

import torch

from rljob_trainer.algorithms.aggregation import Denominators, count_denominators
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.token_batch import TokenBatch


class RankReduce:
    """`Reduce` over the data-parallel ranks of an engine."""

    def __init__(self, engine: TrainEngine) -> None:
        self.sum = engine.sum_over_ranks
        self.max = engine.max_over_ranks


def token_denominators(mini_batch: TokenBatch, engine: TrainEngine) -> Denominators:
    """Collective. Counts of the mini-batch over all workers."""
    mine = count_denominators(Segments.of(mini_batch.response_lengths, torch.device("cpu")))
    counts = torch.tensor([mine.num_tokens, mine.num_sequences], dtype=torch.float64)
    return Denominators(*engine.sum_over_ranks(counts).tolist())
