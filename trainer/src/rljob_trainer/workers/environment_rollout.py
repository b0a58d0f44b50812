"""The rollout worker of a job with an environment: each row of a batch is a conversation of several turns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.base import RolloutEngine, SamplingSettings
from rljob_trainer.environments.host import EnvironmentHost
from rljob_trainer.environments.settings import EnvironmentSettings
from rljob_trainer.workers.columns import SAMPLE_IDS
from rljob_trainer.workers.conversations import conversation_columns, episode_requests
from rljob_trainer.workers.rollout import RolloutWorker


class EnvironmentRolloutWorker(RolloutWorker):
    """One rank of the rollout. Of the ranks that share a copy of the model, the first one talks with the environments;
    the others make the same calls of the engine."""

    def __init__(
        self,
        context: WorkerContext,
        make_engine: Callable[[], RolloutEngine],
        tensor_parallel: int,
        sleep_field: str,
        stall_seconds: float,
        environment: EnvironmentSettings,
    ) -> None:
        """Collective; see RolloutWorker. Raises ConfigurationError."""
        super().__init__(
            context, make_engine, tensor_parallel, sleep_field, stall_seconds, environment.longest_wait_seconds
        )
        self.host: EnvironmentHost | None = None
        """None on ranks that follow another one."""
        if self.loop.is_leader:
            self.host = EnvironmentHost(self.loop, environment, context.rank)
        self._ids: dict[int, int] = {}
        """SAMPLE_IDS of the rollouts that were submitted and not taken or aborted, by the number of the request."""
        self._numbers = count()
        self._num_submits = 0
        self._num_released = 0
        """The value of `_num_submits` at the last release."""

    def submit(self, batch: DataProto, sampling: SamplingSettings) -> DataProto:
        """Begins one rollout per row; see `episode_requests` for the columns. Returns a batch without columns."""
        if not len(batch):
            return DataProto()
        self._num_submits += 1
        if self.host is None:
            self.loop.follow(self._num_submits)
            return DataProto()
        episodes = episode_requests(batch, sampling, self._numbers)
        self._ids |= dict(zip((each.number for each in episodes), batch[SAMPLE_IDS].tolist(), strict=True))
        self.host.submit(episodes)
        return DataProto()

    def take(self, max_seconds: float) -> DataProto:
        """Returns the rollouts that have ended since the last call, with the columns of `conversation_columns`;
        see EnvironmentHost.take for the errors. Waits `max_seconds`, or until none is left."""
        if self.host is None:
            self.loop.check()
            return conversation_columns([], [])
        episodes = self.host.take(max_seconds)
        ids = [self._ids.pop(episode.number) for episode in episodes]
        if episodes and not self._ids:
            self._release()
        return conversation_columns(episodes, ids)

    def abort(self) -> None:
        """Ends all rollouts that were not taken."""
        if self.host is not None:
            self.host.abort()
            self._ids.clear()
            self._release()
        self.loop.wait_until_idle()

    def _release(self) -> None:
        """Lets the ranks that follow this one stop, and waits until the loop's thread does not use the engine."""
        if self._num_released < self._num_submits:
            # Otherwise no rank follows, and this rank would wait for them in a collective.
            self.loop.release(self._num_submits)
            self._num_released = self._num_submits
        self.loop.wait_until_idle()
