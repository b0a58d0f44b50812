"""Workers of one's own, called through worker groups: the best of several guesses, without moving the guesses.

    python examples/worker_groups.py

Two processes hold two roles each. `guesser` makes guesses and leaves them where they were made; `judge`, in the same
processes, gives each a score. Only the scores come to this process, which chooses, and fetches what it has chosen.
docs/worker-groups.md explains the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.groups.calls import Pending
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.object_store import TRAFFIC
from rljob_trainer.groups.ray_session import ray_session
from rljob_trainer.groups.worker_group import built_groups
from rljob_trainer.groups.worker_processes import BuildSettings
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool

NUM_TASKS, NUM_GUESSES, NUM_DIGITS = 4, 64, 6


class Guesser(Worker):
    """Sorts digits by guessing: shuffles them."""

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def guess(self, tasks: DataProto, seed: int) -> DataProto:
        """Column `guesses` [B, NUM_DIGITS] for column `digits`."""
        generator = torch.Generator().manual_seed(1000 * seed + self.context.rank)
        order = torch.rand(tasks["digits"].shape, generator=generator).argsort(dim=1)
        return DataProto({"guesses": tasks["digits"].gather(1, order)})


class Judge(Worker):
    """Knows what is sorted; is told how many points each pair of neighbours is worth."""

    def __init__(self, context: WorkerContext, points: float) -> None:
        super().__init__(context)
        self.points = points

    @register(Dispatch.DP_COMPUTE_PROTO)
    def score(self, batch: DataProto) -> DataProto:
        """Column `score` [B]."""
        return DataProto({"score": self.points * self._num_ascending(batch)})

    @register(Dispatch.DP_COMPUTE_METRIC)
    def statistics(self, batch: DataProto) -> Metrics:
        """Of all workers together: the mean of means, the largest of maxima, as the ends of the names say."""
        ascending = self._num_ascending(batch)
        return {"ascending/mean": float(ascending.mean()), "ascending/max": float(ascending.max())}

    def _num_ascending(self, batch: DataProto) -> torch.Tensor:
        return (batch["guesses"].diff(dim=1) >= 0).sum(dim=1).float()


def make_judge(points: float, context: WorkerContext, others: Mapping[str, Worker]) -> Judge:
    """How a process builds this role. `others` are the workers of the roles before it, which it may use."""
    assert list(others) == ["guesser"]
    return Judge(context, points)


class GuesserGroup(Protocol):
    """All guessers: what the worker returns, as the caller gets it."""

    def guess(self, tasks: DataProto, seed: int) -> Pending[DataProto]: ...


class JudgeGroup(Protocol):
    """All judges. A `Pending` may stand for a batch."""

    def score(self, batch: DataProto | Pending[DataProto]) -> DataProto: ...

    def statistics(self, batch: DataProto | Pending[DataProto]) -> Metrics: ...


def main() -> None:
    """The controller."""
    settings = PoolSettings(
        "main", num_nodes=1, num_devices_per_node=2, use_gpu=False, num_cpus_per_device=1, timeout_seconds=60
    )
    roles = [RoleSpec("guesser", Guesser), RoleSpec("judge", Judge, partial(make_judge, 1.0))]
    with (
        ray_session(None, num_cpus=3, num_gpus=0),
        ResourcePool(settings) as pool,
        built_groups(pool, BuildSettings("cpu", num_threads=1), roles) as groups,
    ):
        search(groups["guesser"].seen_as(GuesserGroup), groups["judge"].seen_as(JudgeGroup))
        alone = groups["judge"].sub_group(0, 1).seen_as(JudgeGroup)  # the same role on some of its ranks
        sorted_digits = DataProto({"guesses": torch.arange(NUM_DIGITS)[None]})
        print("points of what is sorted:", float(alone.score(sorted_digits)["score"]))


def search(guessers: GuesserGroup, judges: JudgeGroup) -> None:
    """The data flow, as plain calls."""
    digits = torch.randint(0, 10, (NUM_TASKS, NUM_DIGITS), generator=torch.Generator().manual_seed(0))
    tasks = DataProto({"digits": digits}).repeat(NUM_GUESSES)
    TRAFFIC.take()
    guesses = guessers.guess(tasks, seed=1)  # goes on while this process does something else
    scores = judges.score(guesses)["score"]  # each process judges what it has made itself
    print("all guesses:", judges.statistics(guesses))
    batch = guesses.result()
    print("stays with the workers:", [name for name in batch.column_names() if batch.is_remote(name)])
    best = scores.reshape(NUM_TASKS, NUM_GUESSES).argmax(dim=1) + NUM_GUESSES * torch.arange(NUM_TASKS)
    chosen = batch.rows(best).fetched()  # only now are the shards in which these rows lie read here
    for given, found in zip(digits.tolist(), chosen["guesses"].tolist(), strict=True):
        print(f"{given} -> {found}")
    print(f"through this process: {TRAFFIC.sent_bytes} bytes out, {TRAFFIC.received_bytes} in")


if __name__ == "__main__":
    main()
