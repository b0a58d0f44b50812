"""The hybrid engine: training and generation take turns on the same device, in one process.

    trainer_mode                       rollout_mode
    forward, backward, update   ->   generate   ->   forward, ...

These two own the order in which state comes to the device and leaves it; nobody else wakes, sleeps or synchronises.
docs/memory.md has a table of what is where. A process begins in trainer mode.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.engines.train.host_room import check_device_room
from rljob_trainer.observability.memory import MEMORY, Boundary
from rljob_trainer.observability.metrics import TIMING_PREFIX, Metrics
from rljob_trainer.observability.spans import SPANS
from rljob_trainer.weights.sync import sync_weights
from rljob_trainer.workers.actor import ActorWorker
from rljob_trainer.workers.rollout import ROLLOUT_MESH, RolloutWorker

RandomState = tuple[torch.Tensor, torch.Tensor | None]
"""Of torch's generators: the host's, and that of this process's GPU where it has one."""


class HybridWorker(Worker):
    """An actor and a rollout worker that share this process."""

    def __init__(
        self, context: WorkerContext, actor: ActorWorker, rollout: RolloutWorker, rollout_dtype: torch.dtype
    ) -> None:
        super().__init__(context)
        self.actor = actor
        self.rollout = rollout
        self.rollout_dtype = rollout_dtype
        self.synced_version: int | None = None
        self.rollout_random_state = self._random_state()
        self.seconds: dict[str, float] = {}
        self.node_peers = _node_peers(context)
        self._give_memory_back()
        # The engine is awake since it was built: what comes later must fit beside it.
        check_device_room(actor.engine.memory, actor.engine.settings.offload, context.device)
        self.trainer_mode()

    def mesh_position(self, mesh: str) -> MeshPosition:
        """That of the rollout worker."""
        return self.rollout.mesh_position(mesh)

    @register(Dispatch.DP_COMPUTE_PROTO, mesh=ROLLOUT_MESH)
    def generate_sequences(self, batch: DataProto, sampling: SamplingSettings, max_staleness: int) -> DataProto:
        """Responses by weights of the actor that are at most `max_staleness` steps old; see RolloutWorker.generate."""
        with self.generating(max_staleness), self._timed("generate"):
            found = self.rollout.generate(batch, sampling)
            MEMORY.mark(Boundary.GENERATE)
            return found

    @register(Dispatch.DP_COMPUTE_METRIC)
    def take_seconds(self) -> Metrics:
        """Seconds since the last call: `weight_sync`, `generate`. On several ranks the slowest counts."""
        taken = {f"{TIMING_PREFIX}{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds = {}
        return taken

    @register(Dispatch.DP_COMPUTE_METRIC)
    def take_memory(self) -> Metrics:
        """See MemoryRecorder.take_metrics, of all roles of this process; on several ranks the largest count."""
        return MEMORY.take_metrics()

    @contextmanager
    def generating(self, max_staleness: int = 0) -> Iterator[None]:
        """Collective. In rollout mode within, and in trainer mode after it."""
        with self.trainer_rng_kept():
            with self._timed("weight_sync"):
                self.rollout_mode(max_staleness)
            try:
                yield
            finally:
                self.trainer_mode()

    def rollout_mode(self, max_staleness: int = 0) -> None:
        """Collective. The rollout engine is awake and has the actor's weights, of now or of at most `max_staleness`
        steps ago; what is offloaded has left the device.

        The reference's parameters, the moments and the gradients have left before, each at the end of its use."""
        engine = self.rollout.engine
        MEMORY.mark(Boundary.STEP_BEFORE)
        # The engine's memory comes from outside torch's allocator: what that holds in reserve is in the way.
        self._give_memory_back()
        engine.wake(weights=True, kv_cache=False)
        MEMORY.mark(Boundary.WAKE_WEIGHTS)
        if self._is_too_old(max_staleness):
            sync_weights(self.actor.engine, engine, self.rollout_dtype, self.actor.policy_version)
            self.synced_version = self.actor.policy_version
        self.actor.engine.leave_device()
        self._give_memory_back()
        MEMORY.mark(Boundary.SYNC_WEIGHTS)
        if self.node_peers is not None:
            # The host's memory is shared: no cache is woken while a peer still holds buckets.
            dist.barrier(self.node_peers)
        engine.wake(weights=False, kv_cache=True)
        engine.clear_cache()
        MEMORY.mark(Boundary.WAKE_KV_CACHE)

    def trainer_mode(self) -> None:
        """Collective. The rollout engine sleeps; the actor's parameters are on their way back to the device."""
        engine = self.rollout.engine
        engine.sleep()
        if engine.forgets_weights_asleep:
            self.synced_version = None
        self._give_memory_back()
        self.actor.engine.fetch_parameters()
        MEMORY.mark(Boundary.SLEEP)

    @contextmanager
    def trainer_rng_kept(self) -> Iterator[None]:
        """The random numbers of generation are a stream of their own on the host and on the device: training goes on
        as if it had not happened."""
        trainer_state = self._random_state()
        self._set_random_state(self.rollout_random_state)
        try:
            yield
        finally:
            self.rollout_random_state = self._random_state()
            self._set_random_state(trainer_state)

    def _is_too_old(self, max_staleness: int) -> bool:
        """Whether the engine has no weights, weights of another life of the actor, or ones that are older."""
        if self.synced_version is None:
            return True
        return not 0 <= self.actor.policy_version - self.synced_version <= max_staleness

    def _random_state(self) -> RandomState:
        device = torch.cuda.get_rng_state(self.context.device) if self.context.device_type == "cuda" else None
        return torch.get_rng_state(), device

    def _set_random_state(self, state: RandomState) -> None:
        host, device = state
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device, self.context.device)

    def _give_memory_back(self) -> None:
        """Returns what torch's allocator holds in reserve, so that the other engine can have it."""
        if self.context.device_type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with SPANS.span(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def _node_peers(context: WorkerContext) -> dist.ProcessGroup | None:
    """Collective. The ranks on this rank's node; None where it is alone there."""
    nodes = [0] * context.world_size
    dist.all_gather_object(nodes, context.node_rank)
    found: dist.ProcessGroup | None = None
    for node in sorted(set(nodes)):
        ranks = [rank for rank, each in enumerate(nodes) if each == node]
        # All ranks make all groups.
        group = dist.new_group(ranks, backend="gloo") if len(ranks) > 1 else None
        found = group if node == context.node_rank else found
    return found
