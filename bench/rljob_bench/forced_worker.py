"""The hybrid worker of the measured rollouts, whose engine generates responses of given lengths."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.workers.actor import ActorWorker
from rljob_trainer.workers.factories import ACTOR, ROLLOUT
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from rljob_bench.forced_engine import ForcedEngine

CACHE_BYTES = 192 * 2**20


class ForcedHybrid(HybridWorker):
    """A hybrid worker with a ForcedEngine."""

    @register(Dispatch.ONE_TO_ALL)
    def set_step_seconds(self, seconds: float) -> None:
        """See ForcedEngine.step_seconds."""
        self._engine().step_seconds = seconds

    @register(Dispatch.ONE_TO_ALL)
    def take_steps(self) -> tuple[int, float]:
        """The number of steps of this engine since the last call, and their seconds."""
        engine = self._engine()
        taken = (engine.num_steps, engine.seconds_in_steps)
        engine.num_steps, engine.seconds_in_steps = 0, 0.0
        return taken

    @register(Dispatch.ONE_TO_ALL)
    def cpu_seconds(self) -> float:
        """Processor time of this process since its start, of all of its threads."""
        return time.process_time()

    def _engine(self) -> ForcedEngine:
        from rljob_bench.forced_engine import ForcedEngine

        assert isinstance(self.rollout.engine, ForcedEngine)
        return self.rollout.engine


def make_rollout(
    model: Path, max_model_length: int, max_num_sequences: int, context: WorkerContext, _others: Mapping[str, Worker]
) -> RolloutWorker:
    """The factory of the rollout worker."""
    from rljob_bench.forced_engine import ForcedEngine
    from rljob_trainer.engines.rollout.vllm_start import VllmSettings

    settings = VllmSettings(
        model_folder=model,
        device_type="cpu",
        compiles=False,
        dtype=torch.float32,
        tensor_parallel=1,
        max_model_length=max_model_length,
        max_num_sequences=max_num_sequences,
        gpu_memory_utilization=0.5,
        cpu_kv_cache_bytes=CACHE_BYTES,
        seed=0,
    )
    return RolloutWorker(context, lambda: ForcedEngine(settings), 1)


def make_hybrid(context: WorkerContext, others: Mapping[str, Worker]) -> ForcedHybrid:
    """The factory of the hybrid worker."""
    actor, rollout = others[ACTOR], others[ROLLOUT]
    assert isinstance(actor, ActorWorker)
    assert isinstance(rollout, RolloutWorker)
    return ForcedHybrid(context, actor, rollout, torch.float32, 0, others=(actor.engine,))
