"""Four roles on two pools: the policy's roles on one; critic, reference and reward model on the other, some of them
fused."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest
import torch

from rljob_testing.ray_clusters import echo_workers
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.object_store import TRAFFIC
from rljob_trainer.groups.worker_group import WorkerGroup, spawn
from rljob_trainer.groups.worker_processes import BuildSettings, start_processes
from rljob_trainer.pools.pool_manager import ResourcePoolManager, plan_roles
from rljob_trainer.pools.resource_pool import PoolSettings

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_driver")]

POOL_OF = {"actor": "policy", "ref": "policy", "critic": "judges", "reward": "judges"}
NUM_ROWS, WIDTH = 64, 16_384


def started(stack: ExitStack, apart: list[list[str]]) -> dict[str, WorkerGroup]:
    """Two processes for the policy's roles, and one for each fused group of the other pool."""
    settings = [
        PoolSettings("policy", 1, 2, False, 0.1, 60),
        PoolSettings("judges", 1, 1, False, 0.1, 60),
    ]
    manager = stack.enter_context(ResourcePoolManager(settings, plan_roles(["policy", "judges"], POOL_OF, apart)))
    groups: dict[str, WorkerGroup] = {}
    for group in manager.plan.groups:
        pool = manager.pool_of(group.roles[0])
        processes = start_processes(pool, {"PYTHONPATH": echo_workers.PYTHON_PATH, "OMP_NUM_THREADS": "1"})
        stack.callback(processes.close)
        roles = [RoleSpec(role, echo_workers.EchoWorker, partial(echo_workers.make_echo, role)) for role in group.roles]
        processes.build(pool.slots(), BuildSettings("cpu", 1, None), roles)
        groups |= spawn(processes)
    return groups


@pytest.mark.parametrize("apart", [[], [["reward"]]], ids=["fused", "partly fused"])
def test_data_moves_between_pools_without_the_controller(apart: list[list[str]]) -> None:
    with ExitStack() as stack:
        groups = started(stack, apart)
        process_ids = {
            role: [process for _, _, process, _ in echo_workers.describe_ranks(group)] for role, group in groups.items()
        }
        assert process_ids["actor"] == process_ids["ref"]
        assert len(process_ids["actor"]) == 2
        assert (process_ids["critic"] == process_ids["reward"]) == (not apart)
        assert not {*process_ids["actor"]} & {*process_ids["critic"], *process_ids["reward"]}

        prompts = DataProto({"x": torch.arange(NUM_ROWS * WIDTH, dtype=torch.float32).view(NUM_ROWS, WIDTH)})
        rollout = echo_workers.call_for_batch(groups["actor"], "add", prompts)
        TRAFFIC.take()
        # Two shards from the policy become one for the other pool, and two again.
        scores = echo_workers.call_for_batch(groups["reward"], "add", rollout)
        values = echo_workers.call_for_batch(groups["critic"], "add", scores)
        reference = echo_workers.call_for_batch(groups["ref"], "add", rollout)
        update = echo_workers.call_for_batch(groups["actor"], "add", values.rename({"x": "values"}).union(reference))
        traffic = TRAFFIC.take()
        assert traffic.sent_bytes + traffic.received_bytes < prompts.num_bytes() / 100
        result = update.fetched()
        assert torch.equal(result["values"], prompts["x"] + 4)
        assert torch.equal(result["x"], prompts["x"] + 3)
