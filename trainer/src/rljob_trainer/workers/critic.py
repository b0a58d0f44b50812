"""The critic: a model that predicts at each token the return from there on. It is trained on the responses' returns.

Legend: N response tokens, L tokens of all rows (prompts and responses).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from rljob_api.v1alpha1.algorithm import LossAggregation
from rljob_api.v1alpha1.optimizer import Optimizer as OptimizerSpec
from rljob_trainer.algorithms.aggregation import Denominators, aggregate_loss
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.algorithms.value_losses import clipped_value_loss, explained_variance
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.optimizer import learning_rate
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.engines.train.token_batch import MicroBatch, TokenBatch, in_rows
from rljob_trainer.observability.memory import MEMORY, Boundary, Bytes, Owner
from rljob_trainer.observability.metrics import (
    CRITIC_GRADIENT_NORM,
    CRITIC_LEARNING_RATE,
    CRITIC_NUM_SKIPPED_UPDATES,
    EXPLAINED_VARIANCE,
    VALUE_LOSS,
    Metrics,
)
from rljob_trainer.observability.spans import SPANS
from rljob_trainer.workers.columns import RETURNS, VALUES, token_batch, trained_mask
from rljob_trainer.workers.trained_worker import TrainedWorker
from rljob_trainer.workers.update_sums import RankReduce, UpdateSums, mini_batches

CRITIC_PREFIX = "critic."
"""The prefix of the critic's tensor names in checkpoints."""
METRIC_PREFIX = "critic/"
"""The prefix of the names of the sums that the value loss returns."""


@dataclass(frozen=True)
class CriticSettings:
    """The settings of a critic. `mini_batch_rows` is the number of responses of a mini-batch per worker;
    `num_steps` is the number of training steps of the run."""

    engine: TrainEngineSettings
    optimizer: OptimizerSpec
    clip_range: float | None
    """How far a value may move from the value before the step's updates until its loss is clipped; None: no
    clipping."""
    num_steps: int
    num_epochs_per_batch: int
    mini_batch_rows: int


class CriticWorker(TrainedWorker):
    """Computes the values of tokens, and trains the critic on returns."""

    prefix = CRITIC_PREFIX
    learning_rate_field = "spec.training.critic.optimizer.learningRate"

    def __init__(self, context: WorkerContext, settings: CriticSettings) -> None:
        """Collective."""
        super().__init__(context, settings.engine)
        self.settings = settings
        MEMORY.watch(self.memory)

    def memory(self) -> Bytes:
        """Bytes that this role has on the device now, by owner."""
        memory = self.engine.memory
        return {
            Owner.CRITIC: memory.parameters + memory.gradients + memory.moments,
            Owner.OTHER: memory.gathered,
        }

    def offload_after_copy(self) -> None:
        """Offloads parameters too, because nothing else offloads the critic's parameters before generation."""
        self.engine.offload_state()

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_values(self, batch: DataProto) -> DataProto:
        """Returns column VALUES; 0 for rows that IS_TRAINED excludes. Needs TOKENS and RESPONSE_MASK."""
        tokens = token_batch(batch)
        values_N = self.engine.values(tokens)
        self.engine.offload_state()
        MEMORY.mark(Boundary.VALUES)
        return DataProto(ragged={VALUES: in_rows(values_N, tokens.response_mask)})

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False)
    def update_critic(self, batch: DataProto, step: int) -> Metrics:
        """Collective. Makes all updates of training step `step` (from 0) on this worker's share of the batch.

        Needs TOKENS, RESPONSE_MASK, IS_TRAINED, VALUES and RETURNS. The metrics are those of the whole batch, equal on
        all ranks. Raises NonFiniteUpdateError after several consecutive updates whose gradients are not finite."""
        rate = learning_rate(self.settings.optimizer, step, self.settings.num_steps)
        sums = UpdateSums()
        explained = self._explained_variance(batch)
        norms = [self._update(*mini_batch, rate, sums) for mini_batch in self._mini_batches(batch)]
        self.engine.offload_state()
        MEMORY.mark(Boundary.UPDATE_CRITIC)
        return {
            **sums.reduced(self.engine, [VALUE_LOSS], {VALUE_LOSS: float(len(norms))}),
            EXPLAINED_VARIANCE: explained,
            CRITIC_GRADIENT_NORM: sum(norms) / len(norms),
            CRITIC_LEARNING_RATE: rate,
            CRITIC_NUM_SKIPPED_UPDATES: float(sum(not math.isfinite(norm) for norm in norms)),
        }

    def _explained_variance(self, batch: DataProto) -> float:
        mask_L = trained_mask(batch).values
        values_N, returns_N = (batch.ragged_column(name).values[mask_L] for name in (VALUES, RETURNS))
        return explained_variance(values_N, returns_N, RankReduce(self.engine))

    def _mini_batches(self, batch: DataProto) -> Iterator[tuple[TokenBatch, Denominators]]:
        for _ in range(self.settings.num_epochs_per_batch):
            yield from mini_batches(batch, (VALUES, RETURNS), self.settings.mini_batch_rows, self.engine)

    def _update(self, mini_batch: TokenBatch, denominators: Denominators, rate: float, sums: UpdateSums) -> float:
        """Makes one optimizer update and returns the gradient norm. Without a token to train on, changes nothing and
        returns 0."""
        if denominators.num_tokens == 0:
            return 0.0
        loss = ValueUpdate(self.settings.clip_range, self.engine.layout.gradient_divisor, denominators, sums)
        with SPANS.span("forward_backward"):
            self.engine.fit_values(mini_batch, loss)
        return self.optimizer_step(rate)


@dataclass(frozen=True)
class ValueUpdate:
    """The loss of one update. It is called with each micro-batch, and adds the micro-batch's metrics to `sums`."""

    clip_range: float | None
    gradient_divisor: int
    """The number of ranks over which gradients are averaged."""
    denominators: Denominators
    sums: UpdateSums

    def __call__(self, micro_batch: MicroBatch, values_N: Tensor) -> Tensor:
        """The micro-batch's part of the mini-batch's loss (the mean over response tokens), 0-d, times
        `gradient_divisor`."""
        if not len(values_N):
            # A rank with fewer rows than others must still take part in the backward pass's collectives.
            return values_N.sum()
        columns = micro_batch.columns
        found = clipped_value_loss(values_N, columns[VALUES], columns[RETURNS], self.clip_range)
        loss = aggregate_loss(
            found.losses_N,
            Segments.of(micro_batch.response_lengths, values_N.device),
            LossAggregation.TOKEN_MEAN,
            self.denominators,
            dp_size=self.gradient_divisor,
            max_new_tokens=1,
        )
        loss_metrics = {METRIC_PREFIX + name: value for name, value in found.sums.items()}
        self.sums.add({VALUE_LOSS: loss / self.gradient_divisor, **loss_metrics}, len(values_N))
        return loss
