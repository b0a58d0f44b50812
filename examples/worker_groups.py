"""Workers of one's own, called through worker groups: the best of several guesses, without moving the guesses.

    python examples/worker_groups.py

Two processes hold two roles each. `guesser` makes guesses and leaves them where they were made; `judge`, in the same
processes, gives each a score. Only the scores come to this process, which chooses, and fetches what it has chosen.
After that come other ways to call workers, and what else a batch can do.
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
    """A dispatch mode of our own: of n workers, worker r gets the rows r, r + n, r + 2n, ..."""
    (batch,) = arguments
    assert isinstance(batch, DataProto)
    ranks = range(len(positions))
    return SplitCall(
        tuple((batch.rows(slice(rank, None, len(ranks))),) for rank in ranks), {rank: rank for rank in ranks}
    )


def gather_in_turn(positions: Sequence[MeshPosition], _call: SplitCall, results: Sequence[object]) -> DataProto:
    """Puts the rows back into their order."""
    together = DataProto.concat([result for result in results if isinstance(result, DataProto)])
    num_ranks = len(positions)
    rows = torch.cat([torch.arange(rank, len(together), num_ranks) for rank in range(num_ranks)])
    return together.reorder(rows.argsort())


register_dispatch_mode("IN_TURN", split_in_turn, gather_in_turn)


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

    @register("IN_TURN")
    def ranks_of_rows(self, batch: DataProto) -> DataProto:
        """Column `rank` [B]: which worker had a row."""
        return DataProto({"rank": torch.full((len(batch),), self.context.rank)})

    @register(Dispatch.ONE_TO_ALL)
    def points_of_worker(self) -> float:
        """Every worker answers."""
        return self.points

    @register(Dispatch.DP_COMPUTE_PROTO, execute=Execute.RANK_ZERO)
    def first_scores(self, batch: DataProto) -> DataProto:
        """Only worker 0 runs, with its part of the batch."""
        return self.score(batch)

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

    def ranks_of_rows(self, batch: DataProto) -> DataProto: ...

    def points_of_worker(self) -> list[float]: ...

    def first_scores(self, batch: DataProto) -> DataProto: ...


def main() -> None:
    """The controller."""
    both = [
        PoolSettings(
            name, num_nodes=1, num_devices_per_node=1, use_gpu=False, num_cpus_per_device=1, timeout_seconds=60
        )
        for name in ("left", "right")
    ]
    roles = [RoleSpec("guesser", Guesser), RoleSpec("judge", Judge, partial(make_judge, 1.0))]
    with ray_session(None, num_cpus=3, num_gpus=0):
        left, right = reserve_pools(both)  # both or none
        with left, right:
            merged = ResourcePool.merged("main", [left, right])  # two pools as one; `split` gives parts
            print("a part of the pool has ranks of its own:", [part.slots()[0].rank for part in merged.split([1, 1])])
            with built_groups(merged, BuildSettings("cpu", num_threads=1), roles) as groups:
                search(groups["guesser"].seen_as(GuesserGroup), groups["judge"].seen_as(JudgeGroup))
                other_calls(groups["judge"])
    batches()


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


def other_calls(judge: WorkerGroup) -> None:
    """Modes and groups that the search does not need."""
    judges = judge.seen_as(JudgeGroup)
    rows = DataProto({"guesses": torch.arange(NUM_DIGITS).repeat(4, 1)})
    print("a mode of our own:", judges.ranks_of_rows(rows)["rank"].tolist())
    print("every worker answers:", judges.points_of_worker())
    print("worker 0 alone, with its part:", judges.first_scores(rows)["score"].tolist())
    alone = judge.sub_group(0, 1).seen_as(JudgeGroup)  # the same role on some of its ranks
    print("points of what is sorted:", float(alone.score(rows.slice(0, 1))["score"]))


def batches() -> None:
    """What a batch can do. No operation changes the batch that it is called on."""
    batch = DataProto.from_columns(
        {"task": ["a", "b", "c"], "digits": [torch.arange(2), torch.arange(5), torch.arange(1)]}
    )
    padded, num_added = batch.padded_to_multiple(2)
    first, second = padded.chunk(2)
    together = DataProto.concat([first, second]).unpadded(num_added)
    print("cut and put together:", together.object_column("task"), together.ragged_column("digits").lengths.tolist())
    scored = together.union(DataProto({"score": torch.tensor([0.5, 0.0, 1.0])}))
    print("the best first:", scored.reorder(scored["score"].argsort(descending=True)).object_column("task"))
    second_opinion = DataProto({"score": torch.tensor([0.0, 1.0, 1.0])}).rename({"score": "second score"})
    both = scored.union(second_opinion)
    print("by both judges:", (both["score"] + both["second score"]).tolist())


if __name__ == "__main__":
    main()
