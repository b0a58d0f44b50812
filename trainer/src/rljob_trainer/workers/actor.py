"""The actor: the policy in training.

Legend: B sequences of this worker, T tokens, N response tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor

from rljob_api.v1alpha1.algorithm import Algorithm, KlPlacement
from rljob_api.v1alpha1.optimizer import Optimizer as OptimizerSpec
from rljob_trainer.algorithms.aggregation import Denominators, aggregate_loss, count_denominators
from rljob_trainer.algorithms.kl import kl_estimate, kl_sums
from rljob_trainer.algorithms.policy_losses import SurrogateStats, clipped_surrogate
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.checkpoints.layout import ShardRecord
from rljob_trainer.checkpoints.load import load_into, open_checkpoint
from rljob_trainer.checkpoints.random_state import capture_random_state, restore_random_state
from rljob_trainer.checkpoints.save import HostBuffers, PendingShard, num_shard_bytes, save_shard_async
from rljob_trainer.checkpoints.sharding import ShardedTensor, sharded_tensors_from_dtensors
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.engines.train.fsdp2 import Fsdp2Engine, TrainEngineSettings, cut_rows, row_lengths
from rljob_trainer.engines.train.optimizer import learning_rate
from rljob_trainer.errors import NonFiniteUpdateError
from rljob_trainer.observability.metrics import (
    GRADIENT_NORM,
    LEARNING_RATE,
    LOGPROB_DIFF_MAX,
    LOGPROB_DIFF_MEAN,
    NUM_SKIPPED_UPDATES,
    Metrics,
)
from rljob_trainer.observability.spans import SPANS
from rljob_trainer.workers.columns import (
    ADVANTAGES,
    IS_LEARNED,
    KL_SUMS,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    TOKENS,
    padded,
    unpadded_like,
)
from rljob_trainer.workers.update_sums import UpdateSums

MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."
"""Of tensor names in checkpoints."""

ROLLOUT_DIFFERENCES = (LOGPROB_DIFF_MEAN, LOGPROB_DIFF_MAX)

MAX_SKIPPED_UPDATES = 5
"""So many updates in a row with gradients that are not finite end the run."""


@dataclass(frozen=True)
class ActorSettings:
    """What an actor is built from. `mini_batch_rows` is this worker's share of a mini-batch, in sequences."""

    engine: TrainEngineSettings
    algorithm: Algorithm
    optimizer: OptimizerSpec
    temperature: float
    samples_all_tokens: bool
    """False with top-p or top-k: the rollout's log-probabilities are then of a truncated distribution."""
    num_steps: int
    num_epochs_per_batch: int
    mini_batch_rows: int


class ActorWorker(Worker):
    """Updates the policy and scores tokens with it."""

    def __init__(self, context: WorkerContext, settings: ActorSettings) -> None:
        """Collective."""
        super().__init__(context)
        self.settings = settings
        self.engine = Fsdp2Engine(settings.engine)
        self.policy_version = 0
        self.num_skipped_in_a_row = 0
        self.host_buffers = HostBuffers()
        self.pending_shard: PendingShard | None = None

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_logprobs(self, batch: DataProto) -> DataProto:
        """Column OLD_LOGPROBS for a batch with TOKENS and RESPONSE_MASK, by the weights as they are now."""
        wide = padded(batch)
        logprobs_BT = self.engine.logprobs(wide[TOKENS], wide[RESPONSE_MASK], self.settings.temperature)
        return DataProto(ragged={OLD_LOGPROBS: unpadded_like(logprobs_BT, batch.ragged_column(TOKENS))})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_kl_sums(self, batch: DataProto) -> DataProto:
        """Column KL_SUMS for a batch with RESPONSE_MASK, OLD_LOGPROBS and REF_LOGPROBS, by the job's estimator."""
        wide = padded(batch)
        kl_BT = kl_estimate(wide[OLD_LOGPROBS], wide[REF_LOGPROBS], self.settings.algorithm.kl.estimator)
        return DataProto({KL_SUMS: kl_sums(kl_BT, wide[RESPONSE_MASK])})

    @register(Dispatch.DP_COMPUTE_METRIC)
    def update_policy(self, batch: DataProto, step: int) -> Metrics:
        """All updates of training step `step` (from 0) on this worker's share of the batch.

        Needs TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS, ADVANTAGES, IS_LEARNED; OLD_LOGPROBS unless there is a single
        update; REF_LOGPROBS where the loss has a KL term. Metrics are those of the whole batch, equal on all ranks.
        Raises NonFiniteUpdateError after several updates in a row whose gradients are not finite."""
        rate = learning_rate(self.settings.optimizer, step, self.settings.num_steps)
        sums = UpdateSums()
        norms: list[float] = []
        for mini_batch in self._mini_batches(_of_tokens(batch)):
            norms.append(self._update(mini_batch, rate, sums))
            sums.num_updates += 1
        self.policy_version = step + 1
        metrics = sums.reduced(self.engine)
        if not self.settings.samples_all_tokens:
            metrics = {name: value for name, value in metrics.items() if name not in ROLLOUT_DIFFERENCES}
        metrics[GRADIENT_NORM] = sum(norms) / len(norms)
        metrics[LEARNING_RATE] = rate
        metrics[NUM_SKIPPED_UPDATES] = float(sum(not math.isfinite(norm) for norm in norms))
        return metrics

    @register(Dispatch.ONE_TO_ALL)
    def num_checkpoint_bytes(self) -> int:
        """What this rank's part of a checkpoint takes in storage."""
        return num_shard_bytes(self._shards())

    @register(Dispatch.ONE_TO_ALL)
    def begin_checkpoint(self, folder: Path) -> None:
        """Copies this rank's shards of weights and optimizer state and begins to write them in the background."""
        self.pending_shard = save_shard_async(folder, self.context.rank, self._shards(), self.host_buffers)

    @register(Dispatch.ONE_TO_ALL)
    def is_checkpoint_written(self) -> bool:
        """Whether `finish_checkpoint` would not have to wait."""
        return self.pending_shard is None or self.pending_shard.done()

    @register(Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self) -> ShardRecord:
        """Waits until this rank's part is durable. Raises CheckpointError."""
        assert self.pending_shard is not None, "begin_checkpoint first"
        pending, self.pending_shard = self.pending_shard, None
        return pending.wait()

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: Path, policy_version: int) -> None:
        """Fills weights and optimizer state, whatever the number of ranks was at the save. Raises CheckpointError."""
        load_into(self._named_state(), open_checkpoint(folder))
        self.policy_version = policy_version

    @register(Dispatch.ONE_TO_ALL)
    def random_state(self) -> JsonValue:
        """The state of this process's random generators."""
        return capture_random_state()

    @register(Dispatch.ALL_TO_ALL)
    def restore_random_state(self, state: JsonValue) -> None:
        """Sets this process's random generators."""
        restore_random_state(state)

    def _named_state(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.engine.named_shards():
            yield MODEL_PREFIX + name, tensor
        for name, tensor in self.engine.named_optimizer_state():
            yield OPTIMIZER_PREFIX + name, tensor

    def _shards(self) -> list[ShardedTensor]:
        return sharded_tensors_from_dtensors(self._named_state(), self.context.rank)

    def _mini_batches(self, batch: DataProto) -> Iterator[DataProto]:
        for _ in range(self.settings.num_epochs_per_batch):
            yield from batch.split(self.settings.mini_batch_rows)

    def _update(self, mini_batch: DataProto, rate: float, sums: UpdateSums) -> float:
        """One optimizer update; returns the gradient norm. Without any token to learn from nothing changes."""
        tokens_BT, mask_BT = mini_batch[TOKENS], mini_batch[RESPONSE_MASK]
        denominators = self._denominators(mask_BT)
        lengths = row_lengths(tokens_BT, mask_BT)
        for rows in self.engine.micro_batches(lengths):
            tokens, mask = cut_rows(rows, lengths, tokens_BT, mask_BT)
            share = mini_batch.rows(rows) if rows else mini_batch.slice(0, 1)
            with SPANS.span("forward_backward"):
                self._backward(share, tokens, mask, denominators, sums)
        if denominators.num_tokens == 0:
            self.engine.drop_gradients()
            return 0.0
        with SPANS.span("optimizer_step"):
            norm = self.engine.optimizer_step(rate)
        self.num_skipped_in_a_row = 0 if math.isfinite(norm) else self.num_skipped_in_a_row + 1
        if self.num_skipped_in_a_row >= MAX_SKIPPED_UPDATES:
            raise NonFiniteUpdateError(
                f"actor: {MAX_SKIPPED_UPDATES} updates in a row had gradients that are not finite and were skipped; "
                "lower spec.training.optimizer.learningRate, or look for infinite rewards in the samples"
            )
        return norm

    def _denominators(self, mask_BT: Tensor) -> Denominators:
        """Counts of the mini-batch over all workers."""
        mine = count_denominators(mask_BT)
        total = self.engine.sum_over_ranks(torch.tensor([mine.num_tokens, mine.num_sequences], dtype=torch.float64))
        return Denominators(float(total[0]), float(total[1]))

    def _backward(
        self, share: DataProto, tokens_BT: Tensor, mask_BT: Tensor, denominators: Denominators, sums: UpdateSums
    ) -> None:
        """Loss and gradient of one micro-batch; `share` has its columns at full width."""
        algorithm = self.settings.algorithm
        logprobs_N, entropy_N = self.engine.score(
            tokens_BT, mask_BT, self.settings.temperature, with_entropy_gradient=algorithm.entropy_coefficient != 0
        )
        mask_BT = mask_BT.to(logprobs_N.device)

        def column(name: str) -> Tensor:
            return share[name][:, : mask_BT.shape[1]].to(mask_BT.device)

        def spread(values_N: Tensor) -> Tensor:
            return torch.zeros(mask_BT.shape, device=mask_BT.device).masked_scatter(mask_BT, values_N.float())

        def aggregated(values_BT: Tensor) -> Tensor:
            return aggregate_loss(
                values_BT, mask_BT, algorithm.loss_aggregation, denominators, dp_size=self.context.world_size
            )

        logprobs_BT = spread(logprobs_N)
        old_BT = column(OLD_LOGPROBS) if OLD_LOGPROBS in share.tensors else logprobs_BT.detach()
        loss_BT, stats = clipped_surrogate(
            logprobs_BT,
            old_BT,
            column(ADVANTAGES),
            mask_BT,
            clip_ratio_low=algorithm.clip_ratio_low,
            clip_ratio_high=algorithm.clip_ratio_high,
            dual_clip_ratio=algorithm.dual_clip_ratio,
        )
        policy_loss = aggregated(loss_BT)
        loss = policy_loss
        if algorithm.entropy_coefficient:
            loss = loss - algorithm.entropy_coefficient * aggregated(spread(entropy_N))
        kl_sum: float | None = None
        if algorithm.kl.coefficient and algorithm.kl.placement is KlPlacement.LOSS:
            kl_BT = kl_estimate(logprobs_BT, column(REF_LOGPROBS), algorithm.kl.estimator)
            loss = loss + algorithm.kl.coefficient * aggregated(kl_BT)
            kl_sum = float((kl_BT.detach() * mask_BT).sum())
        loss.backward()  # type: ignore[no-untyped-call]
        differences_BT = (old_BT - column(ROLLOUT_LOGPROBS)).abs() * mask_BT
        self._count(sums, stats, policy_loss, entropy_N, kl_sum, differences_BT)

    def _count(
        self,
        sums: UpdateSums,
        stats: SurrogateStats,
        policy_loss: Tensor,
        entropy_N: Tensor,
        kl_sum: float | None,
        differences_BT: Tensor,
    ) -> None:
        sums.add(
            num_tokens=float(stats.num_tokens),
            num_clipped=float(stats.num_clipped),
            ppo_kl_sum=float(stats.kl_sum),
            policy_loss=float(policy_loss.detach()) / self.context.world_size,
            entropy_sum=float(entropy_N.detach().sum()),
            kl_sum=kl_sum,
            difference_sum=float(differences_BT.sum()),
            difference_max=float(differences_BT.max()),
        )


def _of_tokens(batch: DataProto) -> DataProto:
    """The batch of an update with all columns as [B, T]: what is not learned from loses its response mask."""
    wide = padded(batch)
    mask_BT = wide[RESPONSE_MASK] & wide[IS_LEARNED][:, None]
    return wide.with_columns({RESPONSE_MASK: mask_BT, ADVANTAGES: wide[ADVANTAGES][:, None] * mask_BT})
