"""Which tokens of a whole mini-batch have the largest numbers, and numbers that stand for a draw: the same however rows
are dealt out to workers and micro-batches.

Legend: B rows, N response tokens of one worker, C some of them, D bins of a histogram.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rljob_trainer.algorithms.interfaces import Reduce
from rljob_trainer.algorithms.segments import Segments

DIGIT_BITS, NUM_PASSES = 11, 3
"""Of keys with 32 bits."""
NUM_DIGITS = 1 << DIGIT_BITS


@dataclass(frozen=True)
class Threshold:
    """The n-th largest key of all workers."""

    key: int
    num_above: int
    """Of larger keys, all workers'."""
    num_equal: int


def nth_largest(keys_C: Tensor, nth: int, reduce: Reduce) -> Threshold:
    """Collective. The `nth` largest (from 1) of the keys of all workers, int64 from 0 to below 2^32; of fewer keys the
    smallest, and -1 where there are none. Exact: digit by digit, with a histogram over all workers for each."""
    # No other than the largest of each worker can be it. On the host, where these few cost least.
    candidates_C = keys_C[_largest_here(keys_C, nth)].cpu().numpy()
    key, num_above, num_equal = 0, 0, 0
    for shift in range(DIGIT_BITS * (NUM_PASSES - 1), -1, -DIGIT_BITS):
        digits_C = (candidates_C >> shift) & (NUM_DIGITS - 1)
        counts_D = reduce.sum(torch.from_numpy(np.bincount(digits_C, minlength=NUM_DIGITS))).numpy()
        num_at_least_D = counts_D[::-1].cumsum()
        num_keys = int(num_at_least_D[-1])
        if num_keys == 0:
            return Threshold(-1, 0, 0)
        place = int(np.searchsorted(num_at_least_D, min(nth - num_above, num_keys)))
        digit = NUM_DIGITS - 1 - place
        num_equal = int(counts_D[digit])
        num_above += int(num_at_least_D[place]) - num_equal
        key = key << DIGIT_BITS | digit
        candidates_C = candidates_C[digits_C == digit]
    return Threshold(key, num_above, num_equal)


def largest(values_N: Tensor, num_wanted: int, reduce: Reduce, draw: Callable[[Tensor], Tensor]) -> Tensor:
    """Collective. Where, [C] int64, this worker has some of the `num_wanted` largest numbers (in float32) of all
    workers. Of tokens with the same number those with the largest keys of `draw`, which is called only if it has to
    decide, with the places of these tokens; what has the same key, too, is taken together, so that there may be more.
    """
    places_C = _largest_here(values_N.float(), num_wanted)
    keys_C = ordered_keys(values_N[places_C])
    bound = nth_largest(keys_C, num_wanted, reduce)
    num_missing = num_wanted - bound.num_above
    if num_missing >= bound.num_equal:
        return places_C[keys_C >= bound.key]
    tied_C = places_C[keys_C == bound.key]
    draws_C = draw(tied_C)
    tie_bound = nth_largest(draws_C, num_missing, reduce)
    return torch.cat([places_C[keys_C > bound.key], tied_C[draws_C >= tie_bound.key]])


def ordered_keys(values_C: Tensor) -> Tensor:
    """[C] int64 from 0 to below 2^32 in the order of float32 numbers."""
    # Adding 0 makes 0 of -0. Read as a whole number a float has its sign and then its size.
    bits_C = (values_C.float() + 0.0).view(torch.int32)
    return (bits_C ^ ((bits_C >> 31) & 0x7FFFFFFF)).to(torch.int64) + (1 << 31)


def drawn_keys(rollout_logprobs_N: Tensor, segments: Segments, places_C: Tensor) -> Tensor:
    """[C] int64 from 0 to below 2^32, as good as random, for the tokens at these places: a hash of a token's place in
    its response, and of the sum, to the last bit of 64, of the log-probabilities that the rollout engine gave to the
    response. Both are the same in a resumed run and on any number of workers. Equal responses with equal numbers have
    equal draws."""
    sums_B = segments.sum(rollout_logprobs_N.double())
    ends_B = segments.lengths_B.cumsum(0)
    rows_C = torch.searchsorted(ends_B, places_C, right=True)
    within_C = places_C - (ends_B - segments.lengths_B)[rows_C]
    of_rows_B = _mixed(sums_B.view(torch.int64).clone())
    return (_mixed(of_rows_B[rows_C] + within_C) >> 32) + (1 << 31)


def _largest_here(values_N: Tensor, num_wanted: int) -> Tensor:
    """[C]: the places of this worker's `num_wanted` largest numbers, and of all that are as large as the last."""
    if num_wanted >= len(values_N):
        return torch.arange(len(values_N), device=values_N.device)
    last = torch.topk(values_N, num_wanted, sorted=False).values.min()
    return (values_N >= last).nonzero().squeeze(1)


def _mixed(values_C: Tensor) -> Tensor:
    """Changes the values, one to one. Source: the finalizer of SplitMix64 (Steele, Lea and Flood 2014,
    doi 10.1145/2660193.2660195)."""
    values_C.bitwise_xor_(_shifted(values_C, 30)).mul_(-0x40A7B892E31B1A47)
    values_C.bitwise_xor_(_shifted(values_C, 27)).mul_(-0x6B2FB644ECCEEE15)
    return values_C.bitwise_xor_(_shifted(values_C, 31))


def _shifted(values_C: Tensor, num_bits: int) -> Tensor:
    """To the right, with zeros coming in: torch's own shift repeats the sign."""
    return (values_C >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)
