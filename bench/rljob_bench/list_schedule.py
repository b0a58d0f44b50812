"""The number of steps that engines need for responses of known lengths, if a slot that becomes free gets the next
response at once. Every running response gets one token per step, so a schedule of a few machines and jobs of known
length gives the number of steps of a rollout.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def num_steps(lengths: Sequence[int], num_slots: int) -> int:
    """The steps of one queue: the responses begin in the given order, each in the slot that is free first."""
    ends = [0] * num_slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def num_steps_of_equal_parts(lengths: Sequence[int], num_engines: int, num_slots: int) -> int:
    """The steps of the slowest engine, if each has a queue of its own with an equal number of consecutive responses."""
    size = len(lengths) // num_engines
    return max(num_steps(lengths[first : first + size], num_slots) for first in range(0, len(lengths), size))


def num_steps_longest_first(lengths: Sequence[int], num_slots: int) -> int:
    """The steps of one queue that has the longest responses first. No rollout knows its lengths in advance."""
    return num_steps(sorted(lengths, reverse=True), num_slots)


def long_tailed(num_groups: int, group_size: int, median: float, longest: int, seed: int) -> list[int]:
    """Lengths of responses, lognormal with a standard deviation of 1 in the logarithm: 0.8 between prompts, 0.6 between
    the responses to one prompt. Limited to `longest`, as by maxNewTokens."""
    drawing = np.random.default_rng(seed)
    of_groups = 0.8 * drawing.standard_normal((num_groups, 1))
    logarithms = np.log(median) + of_groups + 0.6 * drawing.standard_normal((num_groups, group_size))
    lengths = np.exp(logarithms).round().clip(1, longest).astype(int)
    return [int(length) for length in lengths.flatten()]
