"""The methods of each role that the controller can call, with whole batches as arguments and whole results.

A worker group that is built for a worker class has the methods of the protocol for this class; a test compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import JsonValue

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.checkpoints.layout import ShardRecord
from rljob_trainer.checkpoints.storage import Location
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.observability.metrics import Metrics

Result_co = TypeVar("Result_co", covariant=True)


class PendingResult(Protocol[Result_co]):
    """The result of a non-blocking call; see `groups.calls.Pending`."""

    def result(self) -> Result_co:
        """Waits for the result and returns it; may be called again."""


class TrainedGroup(Protocol):
    """All ranks of a model that is trained: the methods for checkpoints; see `TrainedWorker`."""

    def num_checkpoint_bytes(self) -> list[int]:
        """One number per rank; see TrainedWorker.num_checkpoint_bytes."""

    def begin_checkpoint(self, folder: Location, first_writer: int = 0) -> list[None]:
        """See TrainedWorker.begin_checkpoint."""

    def is_checkpoint_written(self) -> list[bool]:
        """One result per rank; see TrainedWorker.is_checkpoint_written."""

    def finish_checkpoint(self) -> list[ShardRecord]:
        """One record per rank; see TrainedWorker.finish_checkpoint."""

    def load_checkpoint(self, folder: Location, policy_version: int) -> list[None]:
        """See TrainedWorker.load_checkpoint."""

    def random_state(self) -> list[JsonValue]:
        """One document per rank; see TrainedWorker.random_state."""

    def restore_random_state(self, state: list[JsonValue]) -> list[None]:
        """One document per rank; see TrainedWorker.restore_random_state."""


class ActorGroup(TrainedGroup, Protocol):
    """All ranks of `ActorWorker`."""

    def compute_logprobs(self, batch: DataProto) -> PendingResult[DataProto]:
        """See ActorWorker.compute_logprobs."""

    def compute_kl_sums(self, batch: DataProto) -> DataProto:
        """See ActorWorker.compute_kl_sums."""

    def compute_token_advantages(
        self, batch: DataProto | list[DataProto], kl_coefficient: float | None = None
    ) -> DataProto:
        """A list has one batch per worker; see ActorWorker.compute_token_advantages."""

    def update_policy(self, batch: DataProto, step: int, kl_coefficient: float | None = None) -> PendingResult[Metrics]:
        """See ActorWorker.update_policy."""

    def recorded_tokens(self) -> DataProto:
        """The rows of all workers; see ActorWorker.recorded_tokens."""

    def skip_update(self, step: int) -> list[None]:
        """See ActorWorker.skip_update."""

    def begin_profile(self, ranks: Sequence[int], run_folder: Path, step: int) -> list[None]:
        """See ActorWorker.begin_profile."""

    def end_profile(self) -> list[str | None]:
        """One result per rank; see ActorWorker.end_profile."""

    def discard_profile(self) -> list[None]:
        """See ActorWorker.discard_profile."""


class HybridGroup(Protocol):
    """All ranks of `HybridWorker`."""

    def begin_rollout(self, syncs: bool) -> list[None]:
        """See HybridWorker.begin_rollout."""

    def submit(self, batch: list[DataProto], sampling: SamplingSettings) -> DataProto:
        """One batch per engine; see HybridWorker.submit."""

    def take(self, max_seconds: float) -> DataProto:
        """The responses of all engines; see HybridWorker.take."""

    def abort(self) -> list[None]:
        """See HybridWorker.abort."""

    def take_metrics(self) -> Metrics:
        """See HybridWorker.take_metrics."""

    def take_memory(self) -> Metrics:
        """See HybridWorker.take_memory."""

    def record_tokens(self, path: Path, step: int, version: int, rows: DataProto, updated: DataProto) -> str | None:
        """See HybridWorker.record_tokens."""


class CriticGroup(TrainedGroup, Protocol):
    """All ranks of `CriticWorker`."""

    def compute_values(self, batch: DataProto) -> PendingResult[DataProto]:
        """See CriticWorker.compute_values."""

    def update_critic(self, batch: DataProto, step: int) -> PendingResult[Metrics]:
        """See CriticWorker.update_critic."""


class RewardModelGroup(Protocol):
    """All ranks of `RewardModelWorker`."""

    def compute_scores(self, batch: DataProto) -> PendingResult[DataProto]:
        """See RewardModelWorker.compute_scores."""


class ReferenceGroup(Protocol):
    """All ranks of `ReferenceWorker`."""

    def compute_ref_logprobs(self, batch: DataProto) -> PendingResult[DataProto]:
        """See ReferenceWorker.compute_ref_logprobs."""


class RewardGroup(Protocol):
    """All ranks of `RewardWorker`."""

    def start_scoring(self, batch: list[DataProto]) -> PendingResult[DataProto]:
        """One batch per rank; see RewardWorker.start_scoring."""
        ...

    def finish_scoring(self, batch: list[DataProto]) -> DataProto:
        """One batch per rank; the result has their rows one after the other. See RewardWorker.finish_scoring."""
        ...

    def completed_ids(self, max_seconds: float) -> list[list[int]]:
        """One list per rank; see RewardWorker.completed_ids."""
        ...

    def take_metrics(self) -> Metrics:
        """See RewardWorker.take_metrics."""
        ...

    def drop_scores(self) -> list[None]:
        """See RewardWorker.drop_scores."""
        ...

    def response_texts(self, batch: DataProto) -> DataProto:
        """See RewardWorker.response_texts."""
