"""Your own workers, called through worker groups: finds the best of several guesses without moving the guesses.

    python examples/worker_groups.py

There are two worker processes, and each holds two roles. `guesser` makes guesses, which stay in its process; `judge`,
in the same processes, gives each guess a score. Only the scores come to this process. It chooses the best guesses and
fetches only these. After that the program shows other ways to call workers, and other operations on batches.
docs/worker-groups.md explains the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.modes import Dispatch, Execute, register_dispatch_mode
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.split_gather import Arguments, SplitCall
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.groups.calls import Pending
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.object_store import TRAFFIC
from rljob_trainer.groups.ray_session import ray_session
from rljob_trainer.groups.worker_group import WorkerGroup, built_groups
from rljob_trainer.groups.worker_processes import BuildSettings
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool, reserve_pools

NUM_TASKS, NUM_GUESSES, NUM_DIGITS = 4, 64, 6


def split_in_turn(positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """Splits a batch for our own dispatch mode: with n workers, worker r gets the rows r, r + n, r + 2n, ..."""
    (batch,) = arguments
    assert isinstance(batch, DataProto)
    ranks = range(len(positions))
    return SplitCall(
        tuple((batch.rows(slice(rank, None, len(ranks))),) for rank in ranks), {rank: rank for rank in ranks}
    )


def gather_in_turn(positions: Sequence[MeshPosition], _call: SplitCall, results: Sequence[object]) -> DataProto:
    """Joins the workers' results, in the original order of the rows."""
    together = DataProto.concat([result for result in results if isinstance(result, DataProto)])
    num_ranks = len(positions)
    rows = torch.cat([torch.arange(rank, len(together), num_ranks) for rank in range(num_ranks)])
    return together.reorder(rows.argsort())


register_dispatch_mode("IN_TURN", split_in_turn, gather_in_turn)


class Guesser(Worker):
    """Tries to sort digits by shuffling them at random."""

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def guess(self, tasks: DataProto, seed: int) -> DataProto:
        """Returns the column `guesses` [B, NUM_DIGITS]: each row of the column `digits`, shuffled."""
        generator = torch.Generator().manual_seed(1000 * seed + self.context.rank)
        order = torch.rand(tasks["digits"].shape, generator=generator).argsort(dim=1)
        return DataProto({"guesses": tasks["digits"].gather(1, order)})


class Judge(Worker):
    """Scores guesses: `points` for each pair of neighbouring digits in ascending order."""

    def __init__(self, context: WorkerContext, points: float) -> None:
        super().__init__(context)
        self.points = points

    @register(Dispatch.DP_COMPUTE_PROTO)
    def score(self, batch: DataProto) -> DataProto:
        """Returns the column `score` [B]."""
        return DataProto({"score": self.points * self._num_ascending(batch)})

    @register(Dispatch.DP_COMPUTE_METRIC)
    def statistics(self, batch: DataProto) -> Metrics:
        """Metrics, combined over all workers by the last word of the name: `mean` is averaged, `max` is the maximum."""
        ascending = self._num_ascending(batch)
        return {"ascending/mean": float(ascending.mean()), "ascending/max": float(ascending.max())}

    @register("IN_TURN")
    def ranks_of_rows(self, batch: DataProto) -> DataProto:
        """Returns the column `rank` [B]: the rank of the worker that got the row."""
        return DataProto({"rank": torch.full((len(batch),), self.context.rank)})

    @register(Dispatch.ONE_TO_ALL)
    def points_of_worker(self) -> float:
        """Runs on every worker; the caller gets a list."""
        return self.points

    @register(Dispatch.DP_COMPUTE_PROTO, execute=Execute.RANK_ZERO)
    def first_scores(self, batch: DataProto) -> DataProto:
        """Only worker 0 runs, with its part of the batch."""
        return self.score(batch)

    def _num_ascending(self, batch: DataProto) -> torch.Tensor:
        return (batch["guesses"].diff(dim=1) >= 0).sum(dim=1).float()


def make_judge(points: float, context: WorkerContext, others: Mapping[str, Worker]) -> Judge:
    """Builds the role `judge` in a worker process. `others` has the workers of the roles that were built before it."""
    assert list(others) == ["guesser"]
    return Judge(context, points)


class GuesserGroup(Protocol):
    """The group of all guessers, as the caller sees it: types of arguments and results for a type checker."""

    def guess(self, tasks: DataProto, seed: int) -> Pending[DataProto]: ...


class JudgeGroup(Protocol):
    """The group of all judges. An argument may be a `Pending` instead of a batch."""

    def score(self, batch: DataProto | Pending[DataProto]) -> DataProto: ...

    def statistics(self, batch: DataProto | Pending[DataProto]) -> Metrics: ...

    def ranks_of_rows(self, batch: DataProto) -> DataProto: ...

    def points_of_worker(self) -> list[float]: ...

    def first_scores(self, batch: DataProto) -> DataProto: ...


def main() -> None:
    """Runs the controller: reserves two pools, builds the groups and calls them."""
    both = [
        PoolSettings(
            name, num_nodes=1, num_devices_per_node=1, use_gpu=False, num_cpus_per_device=1, timeout_seconds=60
        )
        for name in ("left", "right")
    ]
    roles = [RoleSpec("guesser", Guesser), RoleSpec("judge", Judge, partial(make_judge, 1.0))]
    with ray_session(None, num_cpus=3, num_gpus=0):
        left, right = reserve_pools(both)  # reserves both or none
        with left, right:
            merged = ResourcePool.merged("main", [left, right])  # two pools as one; `split` is the opposite
            print("first rank of each part of the pool:", [part.slots()[0].rank for part in merged.split([1, 1])])
            with built_groups(merged, BuildSettings("cpu", num_threads=1), roles) as groups:
                search(groups["guesser"].seen_as(GuesserGroup), groups["judge"].seen_as(JudgeGroup))
                other_calls(groups["judge"])
    batches()


def search(guessers: GuesserGroup, judges: JudgeGroup) -> None:
    """Finds the best guess for each task. The data flow is a sequence of plain calls."""
    digits = torch.randint(0, 10, (NUM_TASKS, NUM_DIGITS), generator=torch.Generator().manual_seed(0))
    tasks = DataProto({"digits": digits}).repeat(NUM_GUESSES)
    TRAFFIC.take()
    guesses = guessers.guess(tasks, seed=1)  # returns at once; the guessers work while this process continues
    scores = judges.score(guesses)["score"]  # each process scores its own guesses
    print("all guesses:", judges.statistics(guesses))
    batch = guesses.result()
    print("columns that stay with the workers:", [name for name in batch.column_names() if batch.is_remote(name)])
    best = scores.reshape(NUM_TASKS, NUM_GUESSES).argmax(dim=1) + NUM_GUESSES * torch.arange(NUM_TASKS)
    chosen = batch.rows(best).fetched()  # only now this process reads data: the shards with these rows
    for given, found in zip(digits.tolist(), chosen["guesses"].tolist(), strict=True):
        print(f"{given} -> {found}")
    print(f"bytes through this process: {TRAFFIC.sent_bytes} sent, {TRAFFIC.received_bytes} received")


def other_calls(judge: WorkerGroup) -> None:
    """Shows dispatch modes and groups that `search` does not use."""
    judges = judge.seen_as(JudgeGroup)
    rows = DataProto({"guesses": torch.arange(NUM_DIGITS).repeat(4, 1)})
    print("the rank that got each row, with our own mode:", judges.ranks_of_rows(rows)["rank"].tolist())
    print("results of all workers:", judges.points_of_worker())
    print("result of worker 0 only:", judges.first_scores(rows)["score"].tolist())
    alone = judge.sub_group(0, 1).seen_as(JudgeGroup)  # the same role on a part of its ranks
    print("score of sorted digits:", float(alone.score(rows.slice(0, 1))["score"]))


def batches() -> None:
    """Shows operations on batches. No operation changes the batch on which it is called."""
    batch = DataProto.from_columns(
        {"task": ["a", "b", "c"], "digits": [torch.arange(2), torch.arange(5), torch.arange(1)]}
    )
    padded, num_added = batch.padded_to_multiple(2)
    first, second = padded.chunk(2)
    together = DataProto.concat([first, second]).unpadded(num_added)
    print("split and joined:", together.object_column("task"), together.ragged_column("digits").lengths.tolist())
    scored = together.union(DataProto({"score": torch.tensor([0.5, 0.0, 1.0])}))
    print("sorted by score:", scored.reorder(scored["score"].argsort(descending=True)).object_column("task"))
    second_opinion = DataProto({"score": torch.tensor([0.0, 1.0, 1.0])}).rename({"score": "second score"})
    both = scored.union(second_opinion)
    print("sum of both scores:", (both["score"] + both["second score"]).tolist())


if __name__ == "__main__":
    main()
