"""The hybrid engine: training and generation take turns on the same device, in one process.

    trainer_mode                       rollout_mode
    forward, backward, update   ->   generate   ->   forward, ...

No code except these two methods wakes the rollout engine, puts it to sleep, or synchronizes weights. A rollout begins
with `rollout_mode`; training engines of this process call `trainer_mode` before each use, such as a pass or a
checkpoint (`TrainEngine.before_use`). So a mode lasts until the other side needs the device: several rollouts in a row
need one switch. Weights are sent if the engine has none, if the actor has loaded a checkpoint since they were sent, or
if they are older than the actor's and this rollout synchronizes. Workers of other roles offload their models at the end
of each use. docs/memory.md has a table of what is on the device in each phase. A process starts in trainer mode.

A thread generates (`RolloutWorker.loop`). Both methods run in the main thread, while the other thread does not use the
engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.engines.device_memory import DeviceMemory
from rljob_trainer.engines.host_ledger import HOST_LEDGER
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.engines.train.engine import TrainEngine, WeightVersion
from rljob_trainer.engines.train.engine_memory import check_device_memory
from rljob_trainer.errors import described
from rljob_trainer.observability.memory import MEMORY, Boundary
from rljob_trainer.observability.metrics import MERGE_ERROR, TIMING_PREFIX, Metrics
from rljob_trainer.observability.spans import SPANS
from rljob_trainer.observability.token_files import write_token_file
from rljob_trainer.weights.sync import sync_weights
from rljob_trainer.workers.actor import ActorWorker
from rljob_trainer.workers.random_streams import RandomStreams
from rljob_trainer.workers.recorded_tokens import conversations_of
from rljob_trainer.workers.rollout import ROLLOUT_MESH, RolloutWorker


class HybridWorker(Worker):
    """An actor and a rollout worker that share this process."""

    def __init__(
        self,
        context: WorkerContext,
        actor: ActorWorker,
        rollout: RolloutWorker,
        rollout_dtype: torch.dtype,
        seed: int,
        others: Iterable[TrainEngine],
    ) -> None:
        """Collective. `seed` is the seed of the job; `others`: the training engines of other roles in this process.
        From now on training and generation have separate random streams."""
        super().__init__(context)
        self.actor = actor
        self.rollout = rollout
        self.rollout_dtype = rollout_dtype
        self.synced_weights: WeightVersion | None = None
        """The actor's `weight_version` that the rollout engine has; None if it has no weights."""
        self.random_streams = RandomStreams(
            context.device, seed, context.rank, rollout.mesh_position(ROLLOUT_MESH).data_rank
        )
        self.seconds: dict[str, float] = {}
        self.merge_error: float | None = None
        """The part of the merged adapters that rounding lost in the last synchronization; None without merged
        adapters."""
        self.device_memory = DeviceMemory(context)
        self.num_kv_cache_bytes = 0
        self.device_memory.give_back_after_loading()
        self.is_in_rollout_mode = True
        # The rollout engine is still awake, as in later rollouts, so these checks measure what will fit beside it.
        HOST_LEDGER.check()
        check_device_memory(actor.engine.memory, actor.engine.settings.offload, context.device)
        for engine in (actor.engine, *others):
            engine.before_use = self.trainer_mode
        rollout.loop.while_running = self._generation
        self.trainer_mode()

    def mesh_position(self, mesh: str) -> MeshPosition:
        """The position of the rollout worker in the mesh."""
        return self.rollout.mesh_position(mesh)

    @register(Dispatch.ONE_TO_ALL)
    def begin_rollout(self, syncs: bool) -> None:
        """Collective. Changes to rollout mode, which lasts until a training engine of this process is used. No
        submitted request may be unfinished. For `syncs` see `rollout_mode`."""
        self._take_over_engine()
        with self.random_streams.generation(), self._timed("weight_sync"):
            self.rollout_mode(syncs=syncs)

    @register(Dispatch.DP_COMPUTE_PROTO, mesh=ROLLOUT_MESH)
    def submit(self, batch: DataProto, sampling: SamplingSettings) -> DataProto:
        """Begins to generate responses, for `take`; see RolloutWorker.submit. Call `begin_rollout` before the first
        one. Earlier requests may be unfinished."""
        return self.rollout.submit(batch, sampling)

    @register(Dispatch.DP_COMPUTE_PROTO, mesh=ROLLOUT_MESH)
    def take(self, max_seconds: float) -> DataProto:
        """See RolloutWorker.take."""
        return self.rollout.take(max_seconds)

    @register(Dispatch.ONE_TO_ALL)
    def abort(self) -> None:
        """See RolloutWorker.abort."""
        self.rollout.abort()

    @register(Dispatch.DP_COMPUTE_METRIC)
    def take_metrics(self) -> Metrics:
        """Seconds spent in `weight_sync` and `generate` since the last call, and what rounding lost of merged adapters.
        Each metric is the maximum over ranks."""
        taken = {f"{TIMING_PREFIX}{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds = {}
        return taken if self.merge_error is None else {**taken, MERGE_ERROR: self.merge_error}

    @register(Dispatch.DP_COMPUTE_METRIC)
    def take_memory(self) -> Metrics:
        """See MemoryRecorder.take_metrics; covers all roles of this process. Each metric is the maximum over ranks."""
        return MEMORY.take_metrics()

    @register(Dispatch.RANK_ZERO)
    def record_tokens(self, path: Path, step: int, version: int, rows: DataProto, updated: DataProto) -> str | None:
        """Writes the tokens of some conversations to `path` (see `observability/token_files`). Returns what went wrong
        if this was not possible.

        Args:
            step: The number of the step for the file.
            version: The version of the newest weights when the responses were generated.
            rows, updated: See `conversations_of`.
        """
        try:
            write_token_file(path, step, conversations_of(rows, updated, version, self.rollout.engine.tokenizer))
        except Exception as error:
            return described(error)
        return None

    def rollout_mode(self, *, syncs: bool = True) -> None:
        """Collective. Wakes the rollout engine and offloads the actor. If the engine is awake and needs no new
        weights, it stays awake. If it is awake and needs new weights, it is first put to sleep.

        The engine gets the actor's current weights if it has none, if the actor has loaded a checkpoint since the last
        synchronization, or if `syncs` is true and its weights are older. The reference's parameters, the moments and
        the gradients left the device earlier, each at the end of its use."""
        if self._must_sync(syncs):
            self.trainer_mode()
        if not self.is_in_rollout_mode:
            self._wake(syncs)
            self.is_in_rollout_mode = True
        if self.synced_weights == self.actor.engine.weight_version:
            self.rollout.engine.policy_version = self.actor.policy_version

    def trainer_mode(self) -> None:
        """Collective. Puts the rollout engine to sleep if it is awake. Training engines of this process call it before
        they use the device."""
        if not self.is_in_rollout_mode:
            return
        self._take_over_engine()
        engine = self.rollout.engine
        self.is_in_rollout_mode = False
        self.num_kv_cache_bytes = engine.memory.kv_cache
        engine.sleep()
        if engine.forgets_weights_asleep:
            self.synced_weights = None
        MEMORY.mark(Boundary.SLEEP)

    def _take_over_engine(self) -> None:
        """Waits until the loop's thread does not use the engine. No request may be unfinished, except on peers in
        tensor parallelism, which may finish their last step some moments after the leader."""
        loop = self.rollout.loop
        assert not (loop.is_leader and loop.num_unfinished), f"{loop.num_unfinished} requests are unfinished"
        loop.wait_until_idle()

    def _must_sync(self, syncs: bool) -> bool:
        synced, current = self.synced_weights, self.actor.engine.weight_version
        return synced is None or synced.num_loads != current.num_loads or (syncs and synced != current)

    def _wake(self, syncs: bool) -> None:
        actor, engine = self.actor, self.rollout.engine
        MEMORY.mark(Boundary.STEP_BEFORE)
        # The engine does not use torch's allocator, so memory that torch caches would be missing there.
        self.device_memory.return_free_memory()
        engine.wake(weights=True, kv_cache=False)
        MEMORY.mark(Boundary.WAKE_WEIGHTS)
        if self._must_sync(syncs):
            knows_base = self.synced_weights is not None
            self.merge_error = sync_weights(
                actor.engine, engine, self.rollout_dtype, actor.policy_version, knows_base=knows_base
            )
            self.synced_weights = actor.engine.weight_version
        actor.engine.offload_state()
        self.device_memory.return_free_memory()
        MEMORY.mark(Boundary.SYNC_WEIGHTS)
        self.device_memory.make_room_for_cache(self.num_kv_cache_bytes)
        engine.wake(weights=False, kv_cache=True)
        MEMORY.mark(Boundary.WAKE_KV_CACHE)

    @contextmanager
    def _generation(self) -> Iterator[None]:
        """Within this context the thread of the loop generates."""
        with self.random_streams.generation(), self._timed("generate"):
            yield
            MEMORY.mark(Boundary.GENERATE)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with SPANS.span(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
