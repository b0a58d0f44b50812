"""Rows of different lengths stored one after the other, with sums over each row and values spread over each row.

Legend: B rows, N values of all rows, row after row; a row may be empty.

Results are deterministic to the last bit on one machine, also on GPUs: sums over rows and the gradients of spread
values do not use atomic additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True, eq=False)
class Segments:
    """The lengths of rows; use `Segments.of` to make it. The host has a copy of the lengths, so that reading lengths
    does not make the host wait for the device."""

    lengths: tuple[int, ...]
    """[B]: the number of values of each row, on the host."""
    lengths_B: Tensor
    """int64: the same on the device."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Segments:
        """Rows of these lengths. Raises ValueError for a negative length."""
        # NumPy first, because torch needs a microsecond for each number of a list.
        lengths_B = torch.from_numpy(np.fromiter(lengths, np.int64, len(lengths)))
        if len(lengths) and min(lengths) < 0:
            raise ValueError(f"segments: a row cannot have a length of {min(lengths)}; pass the number of its values")
        if device.type == "cuda":
            # A copy from pageable memory would make the host wait for all pending work of the device.
            lengths_B = lengths_B.pin_memory().to(device, non_blocking=True)
        return Segments(tuple(lengths), lengths_B)

    @cached_property
    def num_values(self) -> int:
        """N, the number of values of all rows."""
        return sum(self.lengths)

    @property
    def num_rows(self) -> int:
        """B, the number of rows."""
        return len(self.lengths)

    @property
    def num_nonempty_rows(self) -> int:
        """The number of rows with at least one value."""
        return sum(length > 0 for length in self.lengths)

    @cached_property
    def positions_N(self) -> Tensor:
        """int64: the position of each value within its row, from 0."""
        starts_B = self.lengths_B.cumsum(0) - self.lengths_B
        return torch.arange(self.num_values, device=starts_B.device) - _repeated(starts_B, self)

    def sum(self, values_N: Tensor) -> Tensor:
        """[B]: the sum of each row, accumulated in float64, in the dtype of the values; 0 for an empty row.
        Differentiable."""
        sums_B: Tensor = _Sum.apply(values_N, self)  # type: ignore[no-untyped-call]
        return sums_B

    def mean(self, values_N: Tensor) -> Tensor:
        """[B]: the mean of each row; 0 for an empty row. Differentiable."""
        return self.sum(values_N) / self.lengths_B.clamp(min=1)

    def max(self, values_N: Tensor) -> Tensor:
        """[B]: the maximum of each row; -infinity for an empty row. No gradient flows."""
        return torch.segment_reduce(values_N.detach(), "max", lengths=self.lengths_B, unsafe=True)

    def spread(self, values_B: Tensor) -> Tensor:
        """[N]: each row's value, repeated for every value of the row. Differentiable."""
        values_N: Tensor = _Spread.apply(values_B, self)  # type: ignore[no-untyped-call]
        return values_N


class _Context(FunctionCtx):
    segments: Segments


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, values_N: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        # `unsafe` skips checks that would copy the lengths back from the device.
        sums_B = torch.segment_reduce(values_N.double(), "sum", lengths=segments.lengths_B, unsafe=True)
        return sums_B.to(values_N.dtype)

    @staticmethod
    def backward(ctx: _Context, gradient_B: Tensor) -> tuple[Tensor, None]:
        return ctx.segments.spread(gradient_B), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, values_B: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return _repeated(values_B, segments)

    @staticmethod
    def backward(ctx: _Context, gradient_N: Tensor) -> tuple[Tensor, None]:
        return ctx.segments.sum(gradient_N), None


def _repeated(values_B: Tensor, segments: Segments) -> Tensor:
    """[N]: each value repeated by the length of its row."""
    if values_B.device.type != "cpu" or values_B.dtype == torch.bfloat16:
        return values_B.repeat_interleave(segments.lengths_B, output_size=segments.num_values)
    # On CPUs NumPy is ten times as fast as torch (NumPy 2.3, torch 2.13), but it has no bfloat16.
    return torch.from_numpy(np.repeat(values_B.numpy(), segments.lengths_B.numpy()))
