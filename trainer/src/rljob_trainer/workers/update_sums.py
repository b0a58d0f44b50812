"""The updates of one training step: their rows, and sums over data-parallel ranks for algorithms and metrics.

The sums stay on the device until the end of the step, because reading a sum makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rljob_trainer.algorithms.aggregation import Denominators, count_denominators
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.token_batch import TokenBatch
from rljob_trainer.workers.columns import (
    RESPONSE_NUMBERS,
    TRAINED_LENGTHS,
    UPDATE_MICRO_BATCHES,
    num_marked,
    token_batch,
    trained_mask,
)


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


def mini_batches(
    batch: DataProto, columns: Sequence[str], rows_of_worker: int, engine: TrainEngine
) -> Iterator[tuple[TokenBatch, Denominators]]:
    """Collective. Splits this worker's rows of a step into those of each update, with these columns. An update has
    `rows_of_worker` responses per worker. If a response has several rows (RESPONSE_NUMBERS), an update may have more
    rows, and a column TRAINED_LENGTHS."""
    if RESPONSE_NUMBERS not in batch.tensors:
        for rows in batch.split(rows_of_worker):
            mini_batch = token_batch(rows, columns, UPDATE_MICRO_BATCHES)
            yield mini_batch, _denominators(mini_batch, engine)
        return
    num_responses = rows_of_worker * engine.layout.num_data_ranks
    sizes: list[int] = (batch[RESPONSE_NUMBERS] // num_responses).bincount().tolist()
    for start, end in pairwise(accumulate(sizes, initial=0)):
        rows, denominators = _with_trained_lengths(batch.slice(start, end), num_responses, engine)
        yield token_batch(rows, [*columns, TRAINED_LENGTHS], UPDATE_MICRO_BATCHES), denominators


def _denominators(mini_batch: TokenBatch, engine: TrainEngine) -> Denominators:
    mine = count_denominators(Segments.of(mini_batch.response_lengths, torch.device("cpu")))
    counts = torch.tensor([mine.num_tokens, mine.num_sequences], dtype=torch.float64)
    return Denominators(*engine.sum_over_ranks(counts).tolist())


def _with_trained_lengths(rows: DataProto, num_responses: int, engine: TrainEngine) -> tuple[DataProto, Denominators]:
    """Adds TRAINED_LENGTHS to this worker's rows of an update, which has `num_responses` responses on all workers."""
    numbers_R = rows[RESPONSE_NUMBERS] % num_responses
    lengths_R = torch.tensor(num_marked(trained_mask(rows)), dtype=torch.float64)
    mine = torch.zeros(num_responses, dtype=torch.float64).index_add_(0, numbers_R, lengths_R)
    lengths = engine.sum_over_ranks(mine)
    columns = {TRAINED_LENGTHS: lengths.long()[numbers_R]}
    return rows.with_columns(columns), Denominators(float(lengths.sum()), float((lengths > 0).sum()))
