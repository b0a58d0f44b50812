"""A hybrid of a small actor and generation with transformers for real worker processes. A test can hold its generation
or let it fail. And a worker in the same process that scores."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path

import torch

from rljob_testing.ray_clusters import echo_workers
from rljob_testing.running_clock import RunningClock, clock_in
from rljob_testing.training import engine_updates
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.engines.rollout.base import FinishedSequence
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.engines.rollout.loop import EngineLoop
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.worker_processes import WorkerProcesses
from rljob_trainer.workers.columns import RESPONSE_TEXTS, SCORES
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.rollout import RolloutWorker

MODEL = Path(str(files("rljob_trainer"))) / "assets/sort_digits/model"
HYBRID, SCORER = "hybrid", "scorer"
STALL_SECONDS = 600.0
NUM_FREE_TOKENS = 4
"""Only responses with more tokens can be held."""
CLOCK = "clock"


class GatedEngine(HfEngine):
    """Responses end only at their limit of tokens. While the file `hold` exists, no response gets more than
    NUM_FREE_TOKENS tokens; while `fail` exists, it cannot get more."""

    def __init__(self, settings: HfSettings, folder: Path) -> None:
        super().__init__(settings)
        self.end_tokens = frozenset()
        self.hold, self.fail = folder / "hold", folder / "fail"

    def step(self) -> list[FinishedSequence]:
        """See HfEngine."""
        if any(len(each.token_ids) >= NUM_FREE_TOKENS for each in self.running):
            while self.hold.exists():
                time.sleep(0.01)
            if self.fail.exists():
                raise ArithmeticError("the engine is broken")
        return super().step()


class Scorer(Worker):
    """Scores a response by the length of its text."""

    @register(blocking=False)
    def score(self, batch: DataProto) -> DataProto:
        """Returns SCORES."""
        lengths = [float(len(str(text))) for text in batch.object_column(RESPONSE_TEXTS)]
        return DataProto({SCORES: torch.tensor(lengths, dtype=torch.float64)})


def make_hybrid(folder: Path, context: WorkerContext, _others: Mapping[str, Worker]) -> HybridWorker:
    """The factory of the role. `folder` has the clock, and a folder for the files of each rank's engine."""
    actor = engine_updates.build_actor(MODEL, context)
    settings = HfSettings(MODEL, context.device, torch.float32, 8)
    rollout = RolloutWorker(context, lambda: GatedEngine(settings, folder / str(context.rank)), 1)
    rollout.loop = EngineLoop(rollout.engine, stall_seconds=STALL_SECONDS, clock=clock_in(folder / CLOCK))
    return HybridWorker(context, actor, rollout, torch.float32, 0, others=())


def make_scorer(context: WorkerContext, _others: Mapping[str, Worker]) -> Scorer:
    """The factory of the role."""
    return Scorer(context)


@contextmanager
def hybrid_processes(folder: Path, num_ranks: int) -> Iterator[tuple[WorkerProcesses, RunningClock]]:
    """Worker processes with the roles HYBRID and SCORER, one engine per rank, and the clock by which steps of the
    engines stall. For `folder` see `make_hybrid`."""
    clock = RunningClock(folder / CLOCK)
    for rank in range(num_ranks):
        (folder / str(rank)).mkdir()
    roles = [
        RoleSpec(HYBRID, HybridWorker, partial(make_hybrid, folder)),
        RoleSpec(SCORER, Scorer, make_scorer),
    ]
    with echo_workers.echo_processes(num_ranks, roles=roles) as processes:
        yield processes, clock
