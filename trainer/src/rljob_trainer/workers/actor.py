"""The actor: the policy that is trained.

Legend: B responses of this worker, N response tokens, L tokens of all rows (prompts and responses).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.optimizer import Optimizer as OptimizerSpec
from rljob_api.v1alpha1.policy_loss import LossType
from rljob_api.v1alpha1.rollout_correction import OldLogprobs, RolloutCorrectionType
from rljob_trainer.algorithms.advantage_registry import advantage_estimator
from rljob_trainer.algorithms.aggregation import Denominators
from rljob_trainer.algorithms.functions import refuse_not_finite
from rljob_trainer.algorithms.interfaces import KL_PENALTIES, TokenInputs, WholeInputs
from rljob_trainer.algorithms.kl import kl_estimate, kl_sums
from rljob_trainer.algorithms.loss_registry import policy_loss
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.optimizer import learning_rate
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.engines.train.token_batch import TokenBatch, in_rows
from rljob_trainer.engines.train.token_logprobs import Entropy
from rljob_trainer.errors import AlgorithmFunctionError, CollectiveFunctionError, NonFiniteUpdateError
from rljob_trainer.observability.memory import MEMORY, Boundary, Bytes, Owner
from rljob_trainer.observability.metrics import (
    GRADIENT_NORM,
    LEARNING_RATE,
    NUM_SKIPPED_UPDATES,
    WHOLE_PASS_SECONDS,
    Metrics,
)
from rljob_trainer.observability.profiles import profile_file, step_profile
from rljob_trainer.observability.spans import SPANS
from rljob_trainer.settings import nsys_session
from rljob_trainer.workers.columns import (
    ADVANTAGES,
    CORRECTION_WEIGHTS,
    GROUPS,
    IS_TRAINED,
    KL_SUMS,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    RESPONSE_NUMBERS,
    RETURNS,
    REWARDS,
    ROLLOUT_LOGPROBS,
    SQUARES,
    num_marked,
    token_batch,
    trained_mask,
)
from rljob_trainer.workers.recorded_tokens import UpdateRecord
from rljob_trainer.workers.rollout_mismatch import (
    add_agreement,
    agreement_metrics,
    log_ratios,
    staleness,
    with_correction_weights,
    without_rejected,
)
from rljob_trainer.workers.trained_worker import TrainedWorker
from rljob_trainer.workers.update_loss import Agreement, UpdateLoss, update_metrics
from rljob_trainer.workers.update_sums import RankReduce, UpdateSums, mini_batches


@dataclass(frozen=True)
class ActorSettings:
    """The settings of an actor. `mini_batch_rows` is the number of responses of a mini-batch per worker;
    `num_steps` is the number of training steps of the run."""

    engine: TrainEngineSettings
    algorithm: Algorithm
    """The job's algorithm, resolved: all fields that count have values."""
    optimizer: OptimizerSpec
    temperature: float
    max_new_tokens: int
    group_size: int
    samples_all_tokens: bool
    """False with top-p or top-k: then the rollout's log-probabilities are those of a truncated distribution, and cannot
    be compared with the trainer's."""
    num_steps: int
    num_epochs_per_batch: int
    mini_batch_rows: int
    first_step: int = 0
    """The training step (from 0) of the actor's first update; above 0 if only the critic is trained at first."""
    entropy_every_steps: int = 1
    """With n, steps that are multiples of n compute the entropy for its metric; with 0 none."""


class ActorWorker(TrainedWorker):
    """Updates the policy and computes log-probabilities with it."""

    def __init__(self, context: WorkerContext, settings: ActorSettings) -> None:
        """Collective."""
        super().__init__(context, settings.engine)
        self.settings = settings
        self.advantages = advantage_estimator(settings.algorithm, settings.group_size)
        self.policy_loss = policy_loss(settings.algorithm)
        self.policy_version = 0
        self.update_record = UpdateRecord(DataProto())
        self._whole_pass_seconds = 0.0
        self.profile = step_profile(nsys_session())
        self._profile_fault: str | None = None
        MEMORY.watch(self.memory)

    def memory(self) -> Bytes:
        """Bytes that this role has on the device now, by owner."""
        memory = self.engine.memory
        return {
            Owner.PARAMETERS: memory.parameters,
            Owner.GRADIENTS: memory.gradients,
            Owner.OPTIMIZER: memory.moments,
            Owner.OTHER: memory.gathered,
        }

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_logprobs(self, batch: DataProto) -> DataProto:
        """Returns column OLD_LOGPROBS by the current weights, and SQUARES if the advantage needs it; 0 for rows that
        IS_TRAINED excludes. Needs TOKENS and RESPONSE_MASK."""
        tokens = token_batch(batch)
        with_squares = SQUARES in self.advantages.needs
        found = self.engine.forward(tokens, self.settings.temperature, with_squares=with_squares)
        MEMORY.mark(Boundary.OLD_LOGPROBS)
        columns = {OLD_LOGPROBS: in_rows(found.logprobs_N, tokens.response_mask)}
        if found.squares_N is not None:
            columns[SQUARES] = in_rows(found.squares_N, tokens.response_mask)
        return DataProto(ragged=columns)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_kl_sums(self, batch: DataProto) -> DataProto:
        """Returns column KL_SUMS by the job's estimator; 0 for rows that IS_TRAINED excludes. Needs RESPONSE_MASK,
        OLD_LOGPROBS and REF_LOGPROBS."""
        mask = trained_mask(batch)
        old_N, ref_N = (batch.ragged_column(name).values[mask.values] for name in (OLD_LOGPROBS, REF_LOGPROBS))
        kl_N = kl_estimate(old_N, ref_N, self.settings.algorithm.kl.estimator)
        return DataProto({KL_SUMS: kl_sums(kl_N, Segments.of(num_marked(mask), kl_N.device))})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_token_advantages(self, batch: DataProto, kl_coefficient: float | None = None) -> DataProto:
        """Returns column ADVANTAGES with a value per token, by an estimator that works on tokens, and RETURNS if the
        estimator computes them for a critic.

        Needs REWARDS, GROUPS, RESPONSE_MASK, IS_TRAINED and the columns that the estimator declares; also OLD_LOGPROBS
        and REF_LOGPROBS if the job puts KL into the reward. With RESPONSE_NUMBERS the worker must have all rows of each
        of its responses, one after the other: the estimator sees their tokens as those of one response. For
        `kl_coefficient` see `update_policy`."""
        assert self.advantages.for_tokens is not None, "this estimator works on one number per response"
        mask, is_trained_R = trained_mask(batch), batch[IS_TRAINED]
        lengths_B = torch.tensor(num_marked(mask), dtype=torch.int64)[is_trained_R]
        rewards_B, groups_B = batch[REWARDS][is_trained_R], batch[GROUPS][is_trained_R]
        if RESPONSE_NUMBERS in batch.tensors:
            _, num_rows_B = torch.unique_consecutive(batch[RESPONSE_NUMBERS][is_trained_R], return_counts=True)
            last_B = num_rows_B.cumsum(0) - 1
            rewards_B, groups_B = rewards_B[last_B], groups_B[last_B]
            lengths_B = lengths_B.cumsum(0)[last_B].diff(prepend=lengths_B.new_zeros(1))
        coefficient = self._kl_coefficient(kl_coefficient)
        inputs = TokenInputs(
            rewards_B=rewards_B,
            groups_B=groups_B,
            segments=Segments.of(lengths_B.tolist(), torch.device("cpu")),
            columns={name: self._advantage_column(name, batch, mask, coefficient) for name in self.advantages.needs},
        )
        with _as_collective_errors():
            found = self.advantages.for_tokens(inputs, RankReduce(self.engine))
        columns = {ADVANTAGES: in_rows(found.advantages_N.float(), mask)}
        if found.returns_N is not None:
            columns[RETURNS] = in_rows(found.returns_N.float(), mask)
        return DataProto(ragged=columns)

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False)
    def update_policy(self, batch: DataProto, step: int, kl_coefficient: float | None = None) -> Metrics:
        """Collective. Makes all updates of training step `step` (from 0) on this worker's share of the batch.

        `kl_coefficient` is the coefficient in this step if the job has a KL term; None: the coefficient in the job.
        Needs TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS, POLICY_VERSIONS, ADVANTAGES and IS_TRAINED; OLD_LOGPROBS unless
        there is a single update and no rejection; REF_LOGPROBS if the loss has a KL term. The metrics are those of the
        whole batch and, except for seconds, equal on all ranks.

        Raises NonFiniteUpdateError after several consecutive updates whose gradients are not finite, and
        AlgorithmFunctionError if the user's loss fails or returns NaN or infinity."""
        first = self.settings.first_step
        rate = learning_rate(self.settings.optimizer, step - first, self.settings.num_steps - first)
        other_metrics = staleness(batch, self.policy_version, self.engine)
        agreement, sums, record = UpdateSums(), UpdateSums(), UpdateRecord(batch)
        correction = self.settings.algorithm.rollout_correction
        has_pass_before = OLD_LOGPROBS in batch.ragged and correction.old_logprobs is OldLogprobs.TRAINER
        if has_pass_before:
            add_agreement(agreement, log_ratios(batch).to(self.engine.device))
            record.add_old_logprobs()
            if correction.type is not RolloutCorrectionType.NONE:
                batch = with_correction_weights(batch, correction)
        if correction.rejection is not None:
            batch, rejected = without_rejected(batch, correction.rejection, self.engine)
            other_metrics |= rejected
        self._whole_pass_seconds = 0.0
        coefficient, before = self._kl_coefficient(kl_coefficient), self.engine.weight_version
        norms, first_row = [], 0
        for mini_batch, denominators in self._mini_batches(batch):
            # Without a pass before the updates, the first update with tokens computes the agreement, because later ones
            # have other weights.
            has_other_weights = self.engine.weight_version != before
            wanted = None if has_pass_before or has_other_weights else (agreement, partial(record.add, first_row))
            norms.append(self._update(mini_batch, denominators, step, rate, coefficient, sums, wanted))
            first_row += len(mini_batch)
        MEMORY.mark(Boundary.UPDATE)
        self.policy_version = step + 1
        metrics = update_metrics(sums, self.engine, len(norms)) | other_metrics | self.engine.take_routing()
        refuse_not_finite(self.policy_loss, metrics)
        is_comparable = self.settings.samples_all_tokens and (has_pass_before or not self.settings.engine.has_dropout)
        record.end(batch, is_comparable=is_comparable)
        self.update_record = record
        if is_comparable:
            metrics |= agreement_metrics(agreement, self.engine)
        metrics[GRADIENT_NORM] = sum(norms) / len(norms)
        metrics[LEARNING_RATE] = rate
        if self.policy_loss.whole_pass is not None:
            metrics[WHOLE_PASS_SECONDS] = self._whole_pass_seconds
        metrics[NUM_SKIPPED_UPDATES] = float(sum(not math.isfinite(norm) for norm in norms))
        return metrics

    @register(Dispatch.DP_COMPUTE_PROTO)
    def recorded_tokens(self) -> DataProto:
        """Returns what the last update has recorded of the rows with RECORDED_INDEX; see UpdateRecord.result."""
        return self.update_record.result()

    @register(Dispatch.ONE_TO_ALL)
    def skip_update(self, step: int) -> None:
        """Ends training step `step` (from 0) without an update. The policy version still increases, because it must
        equal the number of finished steps, also in a resumed run."""
        self.policy_version = step + 1

    @register(Dispatch.ONE_TO_ALL)
    def begin_profile(self, ranks: Sequence[int], run_folder: Path, step: int) -> None:
        """Starts the profile of step `step` (from 1), if this rank is one of `ranks`."""
        self._profile_fault = None
        if self.context.rank in ranks:
            with self._keeping_profile_fault():
                self.profile.begin(profile_file(run_folder, step, self.context.rank, self.profile.suffix))

    @register(Dispatch.ONE_TO_ALL)
    def end_profile(self) -> str | None:
        """Writes the profile into the run folder, if this rank has begun one. Returns what went wrong if it could not
        begin or cannot be written."""
        if self.profile.is_running:
            with self._keeping_profile_fault():
                self.profile.end()
        return self._profile_fault

    @register(Dispatch.ONE_TO_ALL)
    def discard_profile(self) -> None:
        """Ends the profile without a file, if this rank has begun one."""
        if self.profile.is_running:
            with self._keeping_profile_fault():
                self.profile.discard()

    @contextmanager
    def _keeping_profile_fault(self) -> Iterator[None]:
        """A profiler that fails must not end the run."""
        try:
            yield
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) else None
            self._profile_fault = reason or f"{type(error).__name__}: {error}"

    def checkpoint_loaded(self, policy_version: int) -> None:
        """Called after a checkpoint was loaded: the weights have this version."""
        self.policy_version = policy_version

    def _kl_coefficient(self, of_step: float | None) -> float:
        return self.settings.algorithm.kl.coefficient if of_step is None else of_step

    def _advantage_column(self, name: str, batch: DataProto, mask: RaggedColumn, kl_coefficient: float) -> Tensor:
        """[N]: the column at the tokens that `mask` marks."""
        if name != KL_PENALTIES:
            return batch.ragged_column(name).values[mask.values]
        if not self.settings.algorithm.kl.is_in_reward:
            return torch.zeros(int(mask.values.sum()))
        old_N, ref_N = (batch.ragged_column(each).values[mask.values] for each in (OLD_LOGPROBS, REF_LOGPROBS))
        return kl_coefficient * kl_estimate(old_N, ref_N, self.settings.algorithm.kl.estimator)

    def _mini_batches(self, batch: DataProto) -> Iterator[tuple[TokenBatch, Denominators]]:
        """Collective."""
        names = {ADVANTAGES, ROLLOUT_LOGPROBS, *self.policy_loss.needs}
        names |= {name for name in (OLD_LOGPROBS, REF_LOGPROBS, CORRECTION_WEIGHTS) if name in batch.ragged}
        for _ in range(self.settings.num_epochs_per_batch):
            yield from mini_batches(batch, sorted(names), self.settings.mini_batch_rows, self.engine)

    def _update(
        self,
        mini_batch: TokenBatch,
        denominators: Denominators,
        step: int,
        rate: float,
        kl_coefficient: float,
        sums: UpdateSums,
        agreement: Agreement | None,
    ) -> float:
        """Makes one optimizer update and returns the gradient norm. Without a token to train on, changes nothing and
        returns 0."""
        if denominators.num_tokens == 0:
            return 0.0
        mini_batch, whole, whole_columns = self._whole_pass(mini_batch)
        algorithm = self.settings.algorithm
        loss = UpdateLoss(
            algorithm,
            self.policy_loss,
            denominators,
            kl_coefficient,
            gradient_divisor=self.engine.layout.gradient_divisor,
            max_new_tokens=self.settings.max_new_tokens,
            whole=whole,
            whole_columns=whole_columns,
            sums=sums,
            agreement=agreement,
        )
        with SPANS.span("forward_backward"):
            self.engine.forward_backward(
                mini_batch,
                loss,
                self.settings.temperature,
                self._entropy(step),
                with_squares=self.policy_loss.wanted.squares,
            )
        MEMORY.mark(Boundary.FORWARD_BACKWARD)
        if algorithm.loss.type is LossType.FUNCTION:
            failures = self.engine.names_over_ranks(loss.failures)
            if failures:
                raise AlgorithmFunctionError(failures[0])
        try:
            return self.optimizer_step(rate)
        except NonFiniteUpdateError:
            refuse_not_finite(self.policy_loss, update_metrics(sums, self.engine, 1))
            raise

    def _entropy(self, step: int) -> Entropy:
        """Whether the updates of step `step` (from 0) compute entropy."""
        if self.settings.algorithm.entropy_coefficient:
            return Entropy.GRADIENT
        every = self.settings.entropy_every_steps
        is_due = every > 0 and step % every == 0
        return Entropy.VALUE if is_due or self.policy_loss.wanted.entropy else Entropy.NO

    def _whole_pass(self, mini_batch: TokenBatch) -> tuple[TokenBatch, Mapping[str, Tensor], frozenset[str]]:
        """Runs the loss's `whole_pass`, if it has one, after one more forward pass over the mini-batch.

        Returns the mini-batch with the pass's [N] results as columns, its 0-d results by name, and the names of the new
        columns."""
        if self.policy_loss.whole_pass is None:
            return mini_batch, {}, frozenset()
        started = time.perf_counter()
        with SPANS.span("whole_pass"):
            logprobs_N = self.engine.forward(mini_batch, self.settings.temperature).logprobs_N
            mask_L = mini_batch.response_mask.values
            columns = {name: column.values[mask_L] for name, column in mini_batch.columns.items()}
            inputs = WholeInputs(
                segments=Segments.of(mini_batch.response_lengths, logprobs_N.device),
                logprobs_N=logprobs_N,
                old_logprobs_N=columns.get(OLD_LOGPROBS, logprobs_N),
                advantages_N=columns[ADVANTAGES],
                columns={name: columns[name] for name in self.policy_loss.needs},
            )
            with _as_collective_errors():
                found = self.policy_loss.whole_pass(inputs, RankReduce(self.engine))
        self._whole_pass_seconds += time.perf_counter() - started
        per_token = {name: in_rows(value, mini_batch.response_mask) for name, value in found.items() if value.dim()}
        numbers = {name: value.to(self.engine.device) for name, value in found.items() if not value.dim()}
        columns_of_rows = {**mini_batch.columns, **per_token}
        return replace(mini_batch, columns=columns_of_rows), numbers, frozenset(per_token)


@contextmanager
def _as_collective_errors() -> Iterator[None]:
    """For a function of the user that may call collectives. If it fails on one rank, other ranks may wait for this rank
    forever. So its AlgorithmFunctionError becomes a CollectiveFunctionError: the workers accept no further calls."""
    try:
        yield
    except AlgorithmFunctionError as error:
        raise CollectiveFunctionError(str(error)) from error
