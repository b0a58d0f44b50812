"""The hybrid engine: training and generation take turns on the same device, in one process.

    training                         rollout_mode
    forward, backward, update   ->   weights awake, synchronised, KV cache awake, generate, asleep   ->   training

`rollout_mode` owns the order of the transitions; nobody else wakes, sleeps or synchronises. Outside of it the process
is in training. Optimizer state and gradients stay on the device while the engine is awake.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.observability.metrics import TIMING_PREFIX, Metrics
from rljob_trainer.observability.spans import SPANS
from rljob_trainer.weights.sync import sync_weights
from rljob_trainer.workers.actor import ActorWorker
from rljob_trainer.workers.random_streams import RandomStreams
from rljob_trainer.workers.rollout import ROLLOUT_MESH, RolloutWorker


class HybridWorker(Worker):
    """An actor and a rollout worker that share this process."""

    def __init__(
        self, context: WorkerContext, actor: ActorWorker, rollout: RolloutWorker, rollout_dtype: torch.dtype, seed: int
    ) -> None:
        """`seed` is the job's. Training and generation draw from streams of their own from here on."""
        super().__init__(context)
        self.actor = actor
        self.rollout = rollout
        self.rollout_dtype = rollout_dtype
        self.synced_version: int | None = None
        self.synced_loads = 0
        self.random_streams = RandomStreams(
            context.device, seed, context.rank, rollout.mesh_position(ROLLOUT_MESH).data_rank
        )
        self.seconds: dict[str, float] = {}

    def mesh_position(self, mesh: str) -> MeshPosition:
        """That of the rollout worker."""
        return self.rollout.mesh_position(mesh)

    @register(Dispatch.DP_COMPUTE_PROTO, mesh=ROLLOUT_MESH)
    def generate_sequences(self, batch: DataProto, sampling: SamplingSettings, syncs: bool) -> DataProto:
        """Responses by the actor's present weights, or where it does not sync by those that the engine has, if any; see
        RolloutWorker.generate."""
        with self.rollout_mode(syncs=syncs), self._timed("generate"):
            return self.rollout.generate(batch, sampling)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def take_seconds(self) -> Metrics:
        """Seconds since the last call: `weight_sync`, `generate`. On several ranks the slowest counts."""
        taken = {f"{TIMING_PREFIX}{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds = {}
        return taken

    @contextmanager
    def rollout_mode(self, *, syncs: bool = True) -> Iterator[None]:
        """Collective. Within it the rollout engine is awake and has the actor's weights: those of now where it syncs,
        or has none, or the actor has loaded a checkpoint since."""
        engine = self.rollout.engine
        with self.random_streams.generation():
            with self._timed("weight_sync"):
                # The engine's memory comes from outside torch's allocator: what that holds in reserve is in the way.
                self._give_memory_back()
                engine.wake(weights=True, kv_cache=False)
                version, held = self.actor.policy_version, self.synced_version
                if held is None or (syncs and held != version) or self.actor.num_loads != self.synced_loads:
                    sync_weights(self.actor.engine, engine, self.rollout_dtype, version, knows_base=held is not None)
                    self.synced_version, self.synced_loads = version, self.actor.num_loads
                self._give_memory_back()
                engine.wake(weights=False, kv_cache=True)
                engine.clear_cache()
            try:
                yield
            finally:
                engine.sleep()
                if engine.forgets_weights_asleep:
                    self.synced_version = None
                self._give_memory_back()

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
