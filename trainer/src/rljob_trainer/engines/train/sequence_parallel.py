"""Ulysses sequence parallelism: ranks share a micro-batch's tokens, and exchange tokens for heads in attention.

Each of S ranks holds an equal piece of the flat tokens, independent of rows. All layers except attention process tokens
separately. For attention, an all-to-all gives each rank all tokens of a part of the heads, and another one returns the
attention outputs (Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509, section 3). If there are fewer key and value
heads than ranks, they are repeated. At the end, the results for the response tokens of all pieces are gathered on every
rank, which can then compute the loss of whole rows.

Legend: S sequence ranks, M tokens that the model reads (a multiple of S), P tokens of a piece (M / S), N response
tokens, r response tokens that this rank's piece predicts, H heads, h heads of a rank in attention (H / S), D head size,
E head size of the values, K columns of values that are gathered together, T the largest r of all ranks, X any elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from rljob_trainer.engines.process_group import all_gather_flat
from rljob_trainer.errors import ConfigurationError


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that share a micro-batch's tokens, and this rank's number among them."""

    group: ProcessGroup
    rank: int
    size: int
    """S, the number of sequence ranks."""

    @staticmethod
    def of(group: ProcessGroup) -> SequenceRanks:
        """The ranks of a process group."""
        return SequenceRanks(group, dist.get_rank(group), dist.get_world_size(group))

    def num_filler_tokens(self, num_tokens: int) -> int:
        """The number of filler tokens that make the number of tokens a multiple of S."""
        return -num_tokens % self.size

    def piece(self, num_tokens: int) -> slice:
        """This rank's piece of M tokens."""
        length = num_tokens // self.size
        return slice(self.rank * length, (self.rank + 1) * length)

    def to_heads(self, *tensors_1HPD: Tensor) -> tuple[Tensor, ...]:
        """[1, H, P, D], all heads of this rank's piece -> [1, h, M, D], all tokens for this rank's heads; for each
        tensor."""
        pieces = [self._with_enough_heads(tensor[0]) for tensor in tensors_1HPD]
        sent = [piece.reshape(self.size, -1, *piece.shape[1:]) for piece in pieces]
        received = self._exchanged(sent)
        # Part s of each tensor came from rank s: the P tokens of its piece, for this rank's heads.
        return tuple(each.permute(1, 0, 2, 3).flatten(1, 2)[None] for each in received)

    def to_tokens(self, output_1MhE: Tensor) -> Tensor:
        """[1, M, h, E], all tokens for this rank's heads -> [1, P, H, E], all heads of this rank's piece."""
        sent = output_1MhE[0].reshape(self.size, -1, *output_1MhE.shape[2:])
        [received] = self._exchanged([sent])
        return received.permute(1, 0, 2, 3).flatten(1, 2)[None]

    def gathered(self, values: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Values [r] of this rank's piece -> values [N] of all pieces, in the order of the ranks; for each tensor.
        `counts`: r of every rank. Every rank must compute the same loss from the result; only then is the gradient of
        the rank's own values complete."""
        longest = max(counts)
        own_KT = torch.stack([torch.nn.functional.pad(each, (0, longest - len(each))) for each in values])
        gathered_SKT: Tensor = _Gather.apply(own_KT, self)  # type: ignore[no-untyped-call]
        found = [
            torch.cat([gathered_SKT[rank, column, :count] for rank, count in enumerate(counts)])
            for column in range(len(values))
        ]
        # All values were stacked. Those without gradient must not get one from the others.
        return tuple(each if value.requires_grad else each.detach() for each, value in zip(found, values, strict=True))

    def _with_enough_heads(self, tensor_HPD: Tensor) -> Tensor:
        """Repeats the heads if there are fewer than S. Raises ConfigurationError if neither S nor the number of heads
        divides the other."""
        num_heads = tensor_HPD.shape[0]
        if num_heads % self.size == 0:
            return tensor_HPD
        if self.size % num_heads:
            # Some layers may have another number of heads than the configuration says.
            raise ConfigurationError(
                f"spec.roles: sequenceParallel {self.size} and a layer's {num_heads} key and value heads: neither "
                "divides the other; choose another sequenceParallel"
            )
        return tensor_HPD.repeat_interleave(self.size // num_heads, dim=0)

    def _exchanged(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """Exchanges several tensors [S, ...] in one all-to-all: part s of each goes to rank s."""
        sizes = [each[0].numel() for each in sent]
        flat_SX = torch.cat([each.reshape(self.size, -1) for each in sent], dim=1)
        received_SX: Tensor = _Exchange.apply(flat_SX, self.group)  # type: ignore[no-untyped-call]
        parts = torch.split_with_sizes(received_SX, sizes, dim=1)
        return [part.reshape(each.shape) for part, each in zip(parts, sent, strict=True)]


class _ExchangeContext(FunctionCtx):
    group: ProcessGroup


class _Exchange(torch.autograd.Function):
    """An all-to-all: part s of [S, X] goes to rank s. The gradient goes the same way back, by another all-to-all."""

    @staticmethod
    def forward(ctx: _ExchangeContext, sent_SX: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(sent_SX, group)

    @staticmethod
    def backward(ctx: _ExchangeContext, gradient_SX: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient_SX, ctx.group), None


class _GatherContext(FunctionCtx):
    rank: int


class _Gather(torch.autograd.Function):
    """[K, T] of every rank -> [S, K, T]. All ranks compute the same loss from the result, so the gradient of a rank's
    part is complete on this rank."""

    @staticmethod
    def forward(ctx: _GatherContext, own_KT: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.rank = ranks.rank
        gathered_SKT = own_KT.new_empty((ranks.size, *own_KT.shape))
        all_gather_flat(gathered_SKT.flatten(0, 1), own_KT.contiguous(), ranks.group)
        return gathered_SKT

    @staticmethod
    def backward(ctx: _GatherContext, gradient_SKT: Tensor) -> tuple[Tensor, None]:
        return gradient_SKT[ctx.rank], None


def _exchange(sent_SX: Tensor, group: ProcessGroup) -> Tensor:
    received_SX = torch.empty_like(sent_SX, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received_SX, sent_SX.contiguous(), group=group)
    return received_SX
