"""Values per token whose derivative by the token's own log-probability is known already.

A formula of many steps on single numbers, differentiated by autograd, reads and writes every intermediate result twice
or more. Here value and derivative are worked out side by side without a graph, and the backward pass is one product.

Such formulas mark tokens with 1.0 and 0.0 rather than with bools: PyTorch's operations on CPUs are four to six times as
slow where they read or write bools (torch 2.13).

Legend: N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

Columns = tuple[Tensor, ...]
"""[N] each."""


@dataclass(frozen=True)
class Sloped:
    """What a formula gives, without a graph."""

    slopes_N: Tensor
    values_N: Tensor | None = None
    """None for the product of slopes and log-probabilities."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """0-d."""


def applied(
    formula: Callable[[Columns], Sloped], logprobs_N: Tensor, *others_N: Tensor
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Values as a function of `logprobs_N` with the slopes that the formula finds, and its sums. The formula is given
    the log-probabilities and the others, which stay as they are."""
    with torch.no_grad():
        found = formula((logprobs_N.detach(), *others_N))
    if found.values_N is None:
        # One product is what autograd does best.
        return logprobs_N * found.slopes_N, found.sums
    return with_slopes(logprobs_N, found.values_N, found.slopes_N), found.sums


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
