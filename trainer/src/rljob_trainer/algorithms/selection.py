"""Selects the tokens with the largest values of a whole mini-batch, and draws pseudo-random keys for tokens. Results do
not depend on how rows are distributed across workers and micro-batches.

Legend: B rows, N response tokens of one worker, C candidates among them, H bins of a histogram.
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
"""A 32-bit key is read as NUM_PASSES digits of DIGIT_BITS bits."""
NUM_DIGITS = 1 << DIGIT_BITS
"""The number of different digits."""


@dataclass(frozen=True)
class Threshold:
    """The n-th largest key over all workers."""

    key: int
    num_above: int
    """The number of larger keys on all workers."""
    num_equal: int
    """The number of keys equal to `key` on all workers."""


def nth_largest(keys_C: Tensor, nth: int, reduce: Reduce) -> Threshold:
    """Collective. The `nth` largest key (from 1) over all workers, exactly. Keys are int64 in [0, 2^32).

    With fewer than `nth` keys the result is the smallest key; without any key it is -1. Radix selection: finds the key
    digit by digit, with one histogram over all workers for each digit."""
    # On each worker only the first `nth` keys in descending order are candidates. They are few, so the host processes
    # them.
    candidates_C = keys_C[_largest_here(keys_C, nth)].cpu().numpy()
    key, num_above, num_equal = 0, 0, 0
    for shift in range(DIGIT_BITS * (NUM_PASSES - 1), -1, -DIGIT_BITS):
        digits_C = (candidates_C >> shift) & (NUM_DIGITS - 1)
        counts_H = reduce.sum(torch.from_numpy(np.bincount(digits_C, minlength=NUM_DIGITS))).numpy()
        num_at_least_H = counts_H[::-1].cumsum()
        num_keys = int(num_at_least_H[-1])
        if num_keys == 0:
            return Threshold(-1, 0, 0)
        position = int(np.searchsorted(num_at_least_H, min(nth - num_above, num_keys)))
        digit = NUM_DIGITS - 1 - position
        num_equal = int(counts_H[digit])
        num_above += int(num_at_least_H[position]) - num_equal
        key = key << DIGIT_BITS | digit
        candidates_C = candidates_C[digits_C == digit]
    return Threshold(key, num_above, num_equal)


def largest(values_N: Tensor, num_wanted: int, reduce: Reduce, draw: Callable[[Tensor], Tensor]) -> Tensor:
    """Collective. [C] int64: the positions of those values of this worker that are among the `num_wanted` largest
    values (in float32) of all workers.

    Ties are broken by the largest keys of `draw`, which gets the positions of tied tokens and is called only if there
    is a tie to break. Tokens with equal keys are all selected, so the result may have more than `num_wanted` tokens."""
    positions_C = _largest_here(values_N.float(), num_wanted)
    keys_C = ordered_keys(values_N[positions_C])
    bound = nth_largest(keys_C, num_wanted, reduce)
    num_missing = num_wanted - bound.num_above
    if num_missing >= bound.num_equal:
        return positions_C[keys_C >= bound.key]
    tied_C = positions_C[keys_C == bound.key]
    draws_C = draw(tied_C)
    tie_bound = nth_largest(draws_C, num_missing, reduce)
    return torch.cat([positions_C[keys_C > bound.key], tied_C[draws_C >= tie_bound.key]])


def ordered_keys(values_C: Tensor) -> Tensor:
    """[C] int64 in [0, 2^32): keys in the order of the values as float32."""
    # Adding 0 turns -0 into 0. The bits of a float, read as an integer, are ordered by sign and then by magnitude.
    bits_C = (values_C.float() + 0.0).view(torch.int32)
    return (bits_C ^ ((bits_C >> 31) & 0x7FFFFFFF)).to(torch.int64) + (1 << 31)


def drawn_keys(rollout_logprobs_N: Tensor, segments: Segments, positions_C: Tensor) -> Tensor:
    """[C] int64 in [0, 2^32): a pseudo-random key for the token at each of these positions.

    The key is a hash of the token's position in its response and of the bits of the float64 sum of the response's
    rollout log-probabilities. Both are the same in a resumed run and on any number of workers. Identical responses with
    identical log-probabilities have identical keys."""
    sums_B = segments.sum(rollout_logprobs_N.double())
    ends_B = segments.lengths_B.cumsum(0)
    rows_C = torch.searchsorted(ends_B, positions_C, right=True)
    within_C = positions_C - (ends_B - segments.lengths_B)[rows_C]
    row_hashes_B = _hashed(sums_B.view(torch.int64).clone())
    return (_hashed(row_hashes_B[rows_C] + within_C) >> 32) + (1 << 31)


def _largest_here(values_N: Tensor, num_wanted: int) -> Tensor:
    """[C]: the positions of this worker's `num_wanted` largest values, including all values that are equal to the
    smallest of these."""
    if num_wanted >= len(values_N):
        return torch.arange(len(values_N), device=values_N.device)
    last = torch.topk(values_N, num_wanted, sorted=False).values.min()
    return (values_N >= last).nonzero().squeeze(1)


def _hashed(values_C: Tensor) -> Tensor:
    """Hashes the values one to one, in place. Source: the finalizer of SplitMix64 (Steele, Lea and Flood 2014,
    doi 10.1145/2660193.2660195)."""
    values_C.bitwise_xor_(_shifted(values_C, 30)).mul_(-0x40A7B892E31B1A47)
    values_C.bitwise_xor_(_shifted(values_C, 27)).mul_(-0x6B2FB644ECCEEE15)
    return values_C.bitwise_xor_(_shifted(values_C, 31))


def _shifted(values_C: Tensor, num_bits: int) -> Tensor:
    """A logical right shift: torch's own right shift is arithmetic and copies the sign bit."""
    return (values_C >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)
