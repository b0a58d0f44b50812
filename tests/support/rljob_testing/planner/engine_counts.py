"""Counts what the training engine computes and communicates: the reference for the planner's seconds.

Uses the module, fake tensors and fake ranks of `memory_oracle`. Every operation of one micro-batch is counted from its
shapes: by torch.utils.flop_counter, and for matrix products that accumulate (`addmm_`), which torch does not count, by
our own formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rljob_testing.planner import memory_oracle as oracle

GATHER, REDUCE, OVER_COPIES, EXCHANGE = "gather", "reduce", "over copies", "exchange"
_COLLECTIVES = {
    "c10d._allgather_base_.default": GATHER,
    "c10d._reduce_scatter_base_.default": REDUCE,
    "c10d.allreduce_.default": OVER_COPIES,
    "c10d.alltoall_base_.default": EXCHANGE,
}


@dataclass
class Counts:
    """Counts of one rank and one micro-batch, with a backward pass if the model is trained."""

    products: int = 0
    """Floating-point operations of matrix products outside attention."""
    attention: int = 0
    """Floating-point operations of attention, as if every token of a row attended to all tokens."""
    num_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes by kind of collective, counted at its larger side: after a gather, before a reduction."""


def _added_product(
    total: Sequence[int], left: Sequence[int], right: Sequence[int], out_shape: object, **_: object
) -> int:
    """Floating-point operations of `addmm_`, from its shapes."""
    del total, out_shape
    return 2 * left[0] * left[1] * right[1]


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = dict.fromkeys(_COLLECTIVES.values(), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        del types
        kind = _COLLECTIVES.get(str(func))
        tensors = list(_tensors(args))
        # Leaves out the few float32 numbers of the loss.
        if kind and not (kind is GATHER and tensors[0].dtype is torch.float32):
            self.num_bytes[kind] += max(each.nbytes for each in tensors)
        return func(*args, **(kwargs or {}))


def counted(case: oracle.OracleCase) -> Counts:
    """Counts the last micro-batch of an update, or one pass of a frozen model."""
    added = {torch.ops.aten.addmm_: _added_product}
    with (
        oracle.fake_engine(case) as (model, micro_batch),
        FlopCounterMode(display=False, custom_mapping=added) as operations,
        _Collectives() as collectives,
    ):
        if case.is_trained:
            oracle.training_pass(case, model, micro_batch, is_last=True)
        else:
            oracle.scoring_pass(model, micro_batch)
    by_kind = {str(kind): number for kind, number in operations.get_flop_counts()["Global"].items()}
    attention = sum(number for kind, number in by_kind.items() if "attn" in kind)
    return Counts(sum(by_kind.values()) - attention, attention, collectives.num_bytes)


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
