"""Values per token whose derivative by the token's own log-probability is known already.

A formula of many steps on single numbers, differentiated by autograd, reads and writes every intermediate result twice
or more. Here value and derivative are worked out side by side without a graph, and the backward pass is one product.

Such formulas mark tokens with 1.0 and 0.0 rather than with bools: PyTorch's operations on CPUs are four to six times as
slow where they read or write bools (torch 2.13).

Legend: N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


def with_slopes(logprobs_N: Tensor, values_N: Tensor, slopes_N: Tensor) -> Tensor:
    """`values_N` as a function of `logprobs_N` with the derivatives `slopes_N`; both were made without a graph."""
    linked_N: Tensor = _KnownSlopes.apply(logprobs_N, _Known(values_N, slopes_N))  # type: ignore[no-untyped-call]
    return linked_N


@dataclass(frozen=True)
class _Known:
    """Not passed as tensors: what autograd takes for an input may not be changed in place once it is an output."""

    values_N: Tensor
    slopes_N: Tensor


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor]


class _KnownSlopes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, _: Tensor, known: _Known) -> Tensor:
        ctx.save_for_backward(known.slopes_N)
        return known.values_N

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient_N: Tensor) -> tuple[Tensor, None]:
        (slopes_N,) = ctx.saved_tensors
        return gradient_N * slopes_N, None
