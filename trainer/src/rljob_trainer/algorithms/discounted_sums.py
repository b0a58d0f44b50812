"""Discounted sums over the rest of each row, A_t = x_t + factor A_{t+1}, for all rows of a batch at once.

A plain recurrence takes one step per value of the longest row, and each step works on one value per row. Here the
values of all rows are cut into blocks of 64, independent of rows. The sums within blocks are one product with a
triangular matrix of powers of the factor. The carry from a block to the previous block follows the same recurrence,
over 1/64 of the values. Before the product, this carry is added to the last value of each block. Blocks in which a row
ends before the block's last value are summed value by value, all blocks in parallel.

Legend: N values, C blocks, K values of a block, E blocks in which a row ends before the block's last value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rljob_trainer.algorithms.segments import Segments

WIDTH = 64
"""K, the number of values of a block."""
NEGLIGIBLE = 1e-30
"""Smaller powers of the factor are replaced by 0, because CPUs are slow with denormal numbers."""
VALUES_AT_ONCE = 1 << 17
"""The number of values per part of the product: half a mebibyte in float32, which stays in a core's cache."""

Integers = npt.NDArray[np.int64]


def discounted_sums(values_N: Tensor, segments: Segments, factor: float) -> Tensor:
    """[N]: for each t the sum of factor^(s - t) x_s over all s >= t in its row. `factor` is in [0, 1].

    The result has the dtype of `values_N`, which must be finite and is not changed. There is no cancellation, so the
    only error is rounding, for every factor and length. No gradient flows."""
    lengths = np.fromiter(segments.lengths, np.int64, segments.num_rows)
    with torch.no_grad():
        buffer = _buffer_for(values_N)
        buffer[: len(values_N)] = values_N
        return _sums_in_place(buffer, lengths[lengths > 0], factor)


def last_positions(segments: Segments) -> Tensor:
    """[rows with at least one value]: the position in N of the last value of each such row."""
    return (segments.lengths_B.cumsum(0) - 1)[segments.lengths_B > 0]


def _buffer_for(values_N: Tensor) -> Tensor:
    """Uninitialized memory for these values, padded to whole blocks as `_sums_in_place` needs it."""
    return values_N.new_empty(-(-len(values_N) // WIDTH) * WIDTH)


@dataclass(frozen=True)
class _Blocks:
    """The blocks in which rows end."""

    end_blocks: Integers
    """The block in which each row ends."""
    end_positions: Integers
    """The position within that block of each row's last value."""
    split_E: Integers
    """The blocks in which a row ends before the block's last value."""

    @staticmethod
    def of(lengths: Integers) -> _Blocks:
        end_blocks, end_positions = np.divmod(lengths.cumsum() - 1, WIDTH)
        return _Blocks(end_blocks, end_positions, np.unique(end_blocks[end_positions < WIDTH - 1]))

    def has_next_EK(self) -> npt.NDArray[np.float64]:
        """For each value of the split blocks: 0 for the last value of a row, otherwise 1."""
        is_split = np.isin(self.end_blocks, self.split_E)
        has_next_EK = np.ones((len(self.split_E), WIDTH))
        has_next_EK[np.searchsorted(self.split_E, self.end_blocks[is_split]), self.end_positions[is_split]] = 0.0
        return has_next_EK

    def lengths_in_blocks(self) -> Integers:
        """The row lengths of the recurrence over blocks, in blocks. Each of its rows ends with a block in which a row
        of values ends."""
        lengths_in_blocks: Integers = np.diff(np.unique(self.end_blocks), prepend=-1)
        return lengths_in_blocks

    def blocks_at_row_end(self) -> Integers:
        """The blocks whose last value is the last value of a row."""
        blocks_at_row_end: Integers = self.end_blocks[self.end_positions == WIDTH - 1]
        return blocks_at_row_end


def _sums_in_place(buffer: Tensor, lengths: Integers, factor: float) -> Tensor:
    """Replaces the first N values of `buffer` by their discounted sums. `lengths`: values per row, never 0."""
    num_values = int(lengths.sum())
    if factor == 0.0 or num_values == len(lengths):
        return buffer[:num_values]
    values_CK = buffer.view(-1, WIDTH)
    buffer[num_values:] = 0.0
    powers = np.power(factor, np.arange(WIDTH))
    powers[powers < NEGLIGIBLE] = 0.0
    position_K = np.arange(WIDTH)
    distances_KK = position_K[:, None] - position_K
    triangle_KK = torch.from_numpy(np.where(distances_KK >= 0, powers[distances_KK], 0.0)).to(values_CK)
    blocks = _Blocks.of(lengths)
    split_E = torch.from_numpy(blocks.split_E).to(buffer.device)
    factors_EK = torch.from_numpy(blocks.has_next_EK()).to(values_CK).mul_(factor)
    if len(values_CK) > 1:
        totals_C = values_CK @ triangle_KK[:, 0]
        totals_C[split_E] = _sums_one_by_one(values_CK[split_E], factors_EK)[:, 0]
        _carry(values_CK, totals_C, blocks, factor)
    split_EK = _sums_one_by_one(values_CK[split_E], factors_EK)
    products_CK = values_CK.new_empty(min(len(values_CK), VALUES_AT_ONCE // WIDTH), WIDTH)
    for start in range(0, len(values_CK), len(products_CK)):
        part_CK = values_CK[start : start + len(products_CK)]
        part_CK.copy_(torch.mm(part_CK, triangle_KK, out=products_CK[: len(part_CK)]))
    values_CK[split_E] = split_EK
    return buffer[:num_values]


def _carry(values_CK: Tensor, totals_C: Tensor, blocks: _Blocks, factor: float) -> None:
    """Adds the carry from the next block to the last value of each block. `totals_C`: for each block the discounted sum
    of its values up to the first end of a row, without carry."""
    num_blocks = len(totals_C)
    buffer = _buffer_for(totals_C)
    buffer[:num_blocks] = totals_C
    first_sums_C = _sums_in_place(buffer, blocks.lengths_in_blocks(), factor**WIDTH)
    carries_C = factor * torch.cat([first_sums_C[1:], first_sums_C.new_zeros(1)])
    carries_C[torch.from_numpy(blocks.blocks_at_row_end()).to(carries_C.device)] = 0.0
    values_CK[:, -1] += carries_C


def _sums_one_by_one(values_EK: Tensor, factors_EK: Tensor) -> Tensor:
    """[E, K]: the sums within blocks, with a separate factor for the successor of each value."""
    if not len(values_EK):
        return values_EK
    sums_KE, factors_KE = values_EK.t().contiguous(), factors_EK.t().contiguous()
    for position in reversed(range(WIDTH - 1)):
        sums_KE[position].addcmul_(factors_KE[position], sums_KE[position + 1])
    return sums_KE.t()
