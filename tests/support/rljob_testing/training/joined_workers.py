"""Worker groups without Ray: each gloo rank plays the controller and sees the workers of all ranks. Collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar, cast

import torch.distributed as dist
from pydantic import JsonValue

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.checkpoints.layout import ShardRecord
from rljob_trainer.checkpoints.storage import Location
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.modes import dispatch_mode
from rljob_trainer.dispatch.register import registration_of
from rljob_trainer.dispatch.worker import Worker
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.workers.actor import ActorWorker
from rljob_trainer.workers.critic import CriticWorker
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.reference import ReferenceWorker
from rljob_trainer.workers.reward_model import RewardModelWorker
from rljob_trainer.workers.trained_worker import TrainedWorker

Given = ParamSpec("Given")
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class FinishedCall(Generic[Result_co]):
    """A finished result where the caller expects a pending one."""

    value: Result_co

    def result(self) -> Result_co:
        return self.value


class JoinedWorker:
    """A worker group in which each rank calls its own worker. All ranks must make the same calls."""

    def __init__(self, worker: Worker) -> None:
        self.rank = worker.context.rank
        self.num_ranks = worker.context.world_size
        self.worker_class = type(worker)
        self.positions = [cast(MeshPosition, position) for position in self._of_all_ranks(worker.mesh_position("dp"))]

    def call(self, method: Callable[Given, object], *arguments: Given.args, **named: Given.kwargs) -> object:
        """Calls the worker's method as its registration says: with this rank's share of the arguments, and with the
        gathered results of all ranks."""
        assert not named
        mode = dispatch_mode(registration_of(self.worker_class, method.__name__).dispatch)
        shares = mode.split(self.positions, arguments)
        unchecked = cast(Callable[..., object], method)
        results = self._of_all_ranks(unchecked(*shares.of_rank(self.rank)))
        return mode.gather(self.positions, shares, results)

    def _of_all_ranks(self, mine: object) -> list[object]:
        found: list[object] = [None] * self.num_ranks
        dist.all_gather_object(found, mine)
        return found


class JoinedHybrid(JoinedWorker):
    """All ranks of a HybridWorker, which documents the methods."""

    def __init__(self, worker: HybridWorker) -> None:
        super().__init__(worker)
        self.worker = worker

    def begin_rollout(self, syncs: bool) -> list[None]:
        return cast(list[None], self.call(self.worker.begin_rollout, syncs))

    def submit(self, batch: list[DataProto], sampling: SamplingSettings) -> DataProto:
        unsplit = cast(Callable[[list[DataProto], SamplingSettings], DataProto], self.worker.submit)
        return cast(DataProto, self.call(unsplit, batch, sampling))

    def take(self, max_seconds: float) -> DataProto:
        return cast(DataProto, self.call(self.worker.take, max_seconds))

    def abort(self) -> list[None]:
        return cast(list[None], self.call(self.worker.abort))

    def take_metrics(self) -> Metrics:
        return cast(Metrics, self.call(self.worker.take_metrics))

    def take_memory(self) -> Metrics:
        return cast(Metrics, self.call(self.worker.take_memory))

    def record_tokens(self, path: Path, step: int, version: int, rows: DataProto, updated: DataProto) -> str | None:
        return self.worker.record_tokens(path, step, version, rows, updated) if self.rank == 0 else None


class JoinedReference(JoinedWorker):
    """All ranks of a ReferenceWorker."""

    def __init__(self, worker: ReferenceWorker) -> None:
        super().__init__(worker)
        self.worker = worker

    def compute_ref_logprobs(self, batch: DataProto) -> FinishedCall[DataProto]:
        """See ReferenceWorker."""
        return FinishedCall(cast(DataProto, self.call(self.worker.compute_ref_logprobs, batch)))


class JoinedRewardModel(JoinedWorker):
    """All ranks of a RewardModelWorker."""

    def __init__(self, worker: RewardModelWorker) -> None:
        super().__init__(worker)
        self.worker = worker

    def compute_scores(self, batch: DataProto) -> FinishedCall[DataProto]:
        """See RewardModelWorker."""
        return FinishedCall(cast(DataProto, self.call(self.worker.compute_scores, batch)))


class JoinedTrained(JoinedWorker):
    """All ranks of a model in training, with its checkpoints. For the methods see TrainedWorker."""

    def __init__(self, worker: TrainedWorker) -> None:
        super().__init__(worker)
        self.trained = worker

    def num_checkpoint_bytes(self) -> list[int]:
        return cast(list[int], self.call(self.trained.num_checkpoint_bytes))

    def begin_checkpoint(self, folder: Location, first_writer: int = 0) -> list[None]:
        return cast(list[None], self.call(self.trained.begin_checkpoint, folder, first_writer))

    def is_checkpoint_written(self) -> list[bool]:
        return cast(list[bool], self.call(self.trained.is_checkpoint_written))

    def finish_checkpoint(self) -> list[ShardRecord]:
        return cast(list[ShardRecord], self.call(self.trained.finish_checkpoint))

    def load_checkpoint(self, folder: Location, policy_version: int) -> list[None]:
        return cast(list[None], self.call(self.trained.load_checkpoint, folder, policy_version))

    def random_state(self) -> list[JsonValue]:
        return cast(list[JsonValue], self.call(self.trained.random_state))

    def restore_random_state(self, state: list[JsonValue]) -> list[None]:
        return cast(list[None], self.call(self.trained.restore_random_state, state))


class JoinedCritic(JoinedTrained):
    """All ranks of a CriticWorker, which documents the methods."""

    def __init__(self, worker: CriticWorker) -> None:
        super().__init__(worker)
        self.worker = worker

    def compute_values(self, batch: DataProto) -> FinishedCall[DataProto]:
        return FinishedCall(cast(DataProto, self.call(self.worker.compute_values, batch)))

    def update_critic(self, batch: DataProto, step: int) -> FinishedCall[Metrics]:
        return FinishedCall(cast(Metrics, self.call(self.worker.update_critic, batch, step)))


class JoinedActor(JoinedTrained):
    """All ranks of an ActorWorker, which documents the methods."""

    def __init__(self, worker: ActorWorker) -> None:
        super().__init__(worker)
        self.worker = worker

    def compute_logprobs(self, batch: DataProto) -> FinishedCall[DataProto]:
        return FinishedCall(cast(DataProto, self.call(self.worker.compute_logprobs, batch)))

    def compute_kl_sums(self, batch: DataProto) -> DataProto:
        return cast(DataProto, self.call(self.worker.compute_kl_sums, batch))

    def compute_token_advantages(
        self, batch: DataProto | list[DataProto], kl_coefficient: float | None = None
    ) -> DataProto:
        unsplit = cast(
            Callable[[DataProto | list[DataProto], float | None], DataProto], self.worker.compute_token_advantages
        )
        return cast(DataProto, self.call(unsplit, batch, kl_coefficient))

    def update_policy(self, batch: DataProto, step: int, kl_coefficient: float | None = None) -> FinishedCall[Metrics]:
        return FinishedCall(cast(Metrics, self.call(self.worker.update_policy, batch, step, kl_coefficient)))

    def recorded_tokens(self) -> DataProto:
        return cast(DataProto, self.call(self.worker.recorded_tokens))

    def skip_update(self, step: int) -> list[None]:
        self.worker.skip_update(step)
        return [None]

    def begin_profile(self, ranks: Sequence[int], run_folder: Path, step: int) -> list[None]:
        self.worker.begin_profile(ranks, run_folder, step)
        return [None]

    def end_profile(self) -> list[str | None]:
        return [self.worker.end_profile()]

    def discard_profile(self) -> list[None]:
        self.worker.discard_profile()
        return [None]
