"""Rows of a long-context run, and how much workers wait for each other when they train on them."""

from __future__ import annotations

import numpy as np
import torch

from rljob_trainer.batch.balancing import balanced_partitions
from rljob_trainer.batch.joint_packing import Integers
from rljob_trainer.controller.balanced_order import RowCosts, planned_rows
from rljob_trainer.engines.train.micro_batching import plan_micro_batches

MEDIAN, SPREAD, LONGEST = 4096, 0.8, 16_384


def long_rows(num_rows: int, seed: int, spread: float = SPREAD) -> Integers:
    """Lengths with a lognormal distribution; rows that would be longer than LONGEST have this length."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), spread, num_rows)
    return np.clip(drawn, 1, LONGEST).astype(np.int64)


def imbalance_together(lengths_B: Integers, num_workers: int, num_updates: int, costs: RowCosts) -> float:
    """The cost of the most expensive micro-batches, summed over all updates of the plan, divided by the mean cost of a
    worker."""
    sizes = [len(lengths_B) // num_updates] * num_updates
    return planned_rows(torch.from_numpy(lengths_B), num_workers, sizes, costs).imbalance


def imbalance_alone(lengths_B: Integers, num_workers: int, num_updates: int, costs: RowCosts) -> float:
    """The same if rows are divided by their tokens, and each worker packs its own."""
    highest = mean = 0.0
    for lengths in np.split(lengths_B, num_updates):
        loads = [
            [
                float(costs.of(mine[rows]).sum())
                for rows in plan_micro_batches(mine.tolist(), costs.max_tokens, int, is_padded=False)
            ]
            for mine in (lengths[rows] for rows in balanced_partitions(lengths, num_workers))
        ]
        count = max(map(len, loads))
        loads_WK = np.array([each + [0.0] * (count - len(each)) for each in loads])
        highest += loads_WK.max(axis=0).sum()
        mean += loads_WK.mean(axis=0).sum()
    return highest / mean
