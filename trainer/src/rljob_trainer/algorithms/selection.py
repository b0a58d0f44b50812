"""Which tokens of a whole mini-batch have the largest numbers, and numbers that stand for a draw: the same however rows
are dealt out to workers and micro-batches.

Legend: B rows, N response tokens of one worker, C some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_trainer.algorithms.interfaces import Reduce
from rljob_trainer.algorithms.segments import Segments

KEY_BITS, DIGIT_BITS = 32, 16
NUM_DIGITS = 1 << DIGIT_BITS


@dataclass(frozen=True)
class Threshold:
    """The k-th largest key of all workers."""

    key: int
    num_above: int
    """Of larger keys, all workers'."""
    num_equal: int


def nth_largest(keys_N: Tensor, nth: int, reduce: Reduce) -> Threshold:
    """Collective. The `nth` largest (from 1) of the keys of all workers, int64 from 0 to below 2^32; of fewer keys the
    smallest, and -1 where there are none. Exact: digit by digit, with a histogram over all workers for each."""
    key, num_above = 0, 0
    candidates_C = keys_N
    counts = torch.zeros(NUM_DIGITS, dtype=torch.int64, device=keys_N.device)
    for shift in range(KEY_BITS - DIGIT_BITS, -1, -DIGIT_BITS):
        digits_C = (candidates_C >> shift) & (NUM_DIGITS - 1)
        counts = reduce.sum(torch.bincount(digits_C, minlength=NUM_DIGITS)).cpu()
        num_at_least = counts.flip(0).cumsum(0)
        num_keys = int(num_at_least[-1])
        if num_keys == 0:
            return Threshold(-1, 0, 0)
        wanted = min(nth - num_above, num_keys)
        place = int(torch.searchsorted(num_at_least, wanted))
        digit = NUM_DIGITS - 1 - place
        num_above += int(num_at_least[place] - counts[digit])
        key = key << DIGIT_BITS | digit
        candidates_C = candidates_C[digits_C == digit]
    return Threshold(key, num_above, int(counts[key & (NUM_DIGITS - 1)]))


def largest(keys_N: Tensor, num_wanted: int, reduce: Reduce, draw: Callable[[], Tensor]) -> Tensor:
    """Collective. [N] bool: whether a token is among the `num_wanted` with the largest keys of all workers. Of tokens
    with the same key those with the largest numbers of `draw`, [N], which is called only if it has to decide; tokens
    that have the same number there, too, are taken together, so that there may be more."""
    bound = nth_largest(keys_N, num_wanted, reduce)
    num_missing = num_wanted - bound.num_above
    if num_missing >= bound.num_equal:
        return keys_N >= bound.key
    is_tied_N = keys_N == bound.key
    draws_N = draw()
    tie_bound = nth_largest(draws_N[is_tied_N], num_missing, reduce)
    return (keys_N > bound.key) | (is_tied_N & (draws_N >= tie_bound.key))


def ordered_keys(values_N: Tensor) -> Tensor:
    """[N] int64 from 0 to below 2^32 in the order of float32 numbers."""
    # Adding 0 makes 0 of -0. Read as a whole number a float has its sign and then its size.
    bits_N = (values_N.float() + 0.0).view(torch.int32)
    return (bits_N ^ ((bits_N >> 31) & 0x7FFFFFFF)).to(torch.int64) + (1 << 31)


def drawn_keys(rollout_logprobs_N: Tensor, segments: Segments) -> Tensor:
    """[N] int64 from 0 to below 2^32, as good as random: a hash of a token's place in its response and of the
    log-probabilities that the rollout engine gave to all of the response, to the last bit. These are the same in a
    resumed run and on any number of workers. Equal responses with equal numbers have equal draws."""
    # Place and bits by themselves, mixed, added up over the row: another order of the same tokens is another response.
    places_N = segments.positions_N
    bits_N = rollout_logprobs_N.float().view(torch.int32).to(torch.int64)
    own_N = _mixed(bits_N.bitwise_left_shift_(32).bitwise_xor_(places_N))
    return _mixed(segments.spread(_row_sums(own_N, segments)).add_(places_N)).bitwise_right_shift_(32) + (1 << 31)


def _row_sums(values_N: Tensor, segments: Segments) -> Tensor:
    """[B] int64, modulo 2^64."""
    sums_N = torch.cat([values_N.new_zeros(1), values_N.cumsum(0)])
    ends_B = segments.lengths_B.cumsum(0)
    return sums_N[ends_B] - sums_N[ends_B - segments.lengths_B]


def _mixed(values_N: Tensor) -> Tensor:
    """Changes the values, one to one. Source: the finalizer of SplitMix64 (Steele, Lea and Flood 2014,
    doi 10.1145/2660193.2660195)."""
    values_N.bitwise_xor_(_shifted(values_N, 30)).mul_(-0x40A7B892E31B1A47)
    values_N.bitwise_xor_(_shifted(values_N, 27)).mul_(-0x6B2FB644ECCEEE15)
    return values_N.bitwise_xor_(_shifted(values_N, 31))


def _shifted(values_N: Tensor, num_bits: int) -> Tensor:
    """To the right, with zeros coming in: torch's own shift repeats the sign."""
    return (values_N >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)
