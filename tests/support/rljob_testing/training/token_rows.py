"""Rows of response tokens for tests of algorithms, and the results of a policy loss on a mini-batch and on its parts.

Legend: B rows, T columns of a padded table, N response tokens, row after row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_trainer.algorithms.interfaces import ROLLOUT_LOGPROBS, LossInputs, PolicyLoss, Reduce, WholeInputs
from rljob_trainer.algorithms.loss_registry import policy_loss
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.algorithms.several_workers import on_workers

CPU = torch.device("cpu")


def segments_of(*lengths: int) -> Segments:
    """Segments with these lengths."""
    return Segments.of(lengths, CPU)


def segments_of_mask(mask_BT: Tensor) -> Segments:
    """Segments with as many tokens in each row as the mask has ones."""
    return segments_of(*(int(length) for length in mask_BT.sum(dim=1)))


def flat(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The values where the mask is 1, row after row, [N]."""
    return values_BT[mask_BT.bool()]


@dataclass(frozen=True)
class MiniBatch:
    """Rows of response tokens; a row may be empty."""

    lengths: tuple[int, ...]
    logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    rollout_logprobs_N: Tensor

    def rows(self, chosen: Sequence[int]) -> MiniBatch:
        """A mini-batch of these rows, in this order."""

        def of(values_N: Tensor) -> Tensor:
            found = torch.split_with_sizes(values_N, list(self.lengths))
            return torch.cat([values_N[:0], *(found[row] for row in chosen)])

        return MiniBatch(
            tuple(self.lengths[row] for row in chosen),
            of(self.logprobs_N),
            of(self.old_logprobs_N),
            of(self.advantages_N),
            of(self.rollout_logprobs_N),
        )

    def seen(self) -> WholeInputs:
        """Inputs of the pass over the whole mini-batch."""
        return WholeInputs(
            segments_of(*self.lengths),
            self.logprobs_N,
            self.old_logprobs_N,
            self.advantages_N,
            {ROLLOUT_LOGPROBS: self.rollout_logprobs_N},
        )

    def inputs(self, logprobs_N: Tensor, whole: Mapping[str, Tensor]) -> LossInputs:
        """Inputs of the loss with these log-probabilities instead of `self.logprobs_N`."""
        columns = {ROLLOUT_LOGPROBS: self.rollout_logprobs_N}
        return LossInputs(
            segments_of(*self.lengths),
            logprobs_N,
            self.old_logprobs_N,
            self.advantages_N,
            columns,
            whole=whole,
        )


@dataclass(frozen=True)
class ComputedLoss:
    """The losses of a loss function per token, and its sums."""

    losses_N: Tensor
    gradients_N: Tensor
    """Gradients of the sum of all losses."""
    sums: dict[str, float]


def named_loss(wire: Mapping[str, object]) -> PolicyLoss:
    """The loss that `algorithm.loss` of a job selects."""
    return policy_loss(resolve_algorithm(Algorithm.from_wire({"loss": wire})))


def loss_of_micro_batch(loss: PolicyLoss, batch: MiniBatch, whole: Mapping[str, Tensor]) -> ComputedLoss:
    """Computes the loss of one micro-batch."""
    logprobs_N = batch.logprobs_N.clone().requires_grad_()
    found = loss.compute(batch.inputs(logprobs_N, whole))
    (gradients_N,) = torch.autograd.grad(found.losses_N.sum(), logprobs_N)
    return ComputedLoss(
        found.losses_N.detach(), gradients_N, {name: float(value) for name, value in found.sums.items()}
    )


def losses_on_workers(loss: PolicyLoss, batch: MiniBatch, workers: Sequence[Sequence[int]]) -> dict[int, ComputedLoss]:
    """Computes the losses, by row, with the rows distributed over workers. Each row is a separate micro-batch."""

    def on_worker(rows: Sequence[int], reduce: Reduce) -> dict[int, ComputedLoss]:
        mine = batch.rows(rows)
        whole = {} if loss.whole_pass is None else loss.whole_pass(mine.seen(), reduce)
        parts = {name: torch.split_with_sizes(value, list(mine.lengths)) for name, value in whole.items()}
        return {
            row: loss_of_micro_batch(loss, batch.rows([row]), {name: part[place] for name, part in parts.items()})
            for place, row in enumerate(rows)
        }

    return {row: found for worker in on_workers(workers, on_worker) for row, found in worker.items()}


def losses_in_one_micro_batch(loss: PolicyLoss, batch: MiniBatch) -> dict[int, ComputedLoss]:
    """Computes the losses, by row, with all rows in one micro-batch on one worker. Row 0 has the sums of all rows."""

    def alone(_: None, reduce: Reduce) -> ComputedLoss:
        return loss_of_micro_batch(
            loss, batch, {} if loss.whole_pass is None else loss.whole_pass(batch.seen(), reduce)
        )

    [found] = on_workers([None], alone)
    lengths = list(batch.lengths)
    losses, gradients = (torch.split_with_sizes(each, lengths) for each in (found.losses_N, found.gradients_N))
    return {
        row: ComputedLoss(losses[row], gradients[row], found.sums if row == 0 else {}) for row in range(len(lengths))
    }


def random_mini_batch(
    lengths: Sequence[int], seed: int, spread: float = 0.3, dtype: torch.dtype = torch.float32
) -> MiniBatch:
    """A random mini-batch with one advantage per row."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=dtype)

    old_N = -torch.rand(num_tokens, generator=generator, dtype=dtype) * 3 - 0.01
    logprobs_N = (old_N + spread * normal(num_tokens)).clamp(max=-0.001)
    rollout_N = (old_N + 0.01 * normal(num_tokens)).float()
    return MiniBatch(tuple(lengths), logprobs_N, old_N, segments_of(*lengths).spread(normal(len(lengths))), rollout_N)
