"""How much of a dashboard's response is read, and how long responses delay others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Literal

import pytest

from rljob_operator.metrics import Metrics
from rljob_operator.ray import response_budgets
from rljob_operator.ray.client import DashboardUnreachableError, LargeResponseError, RayClient
from rljob_operator.reconcile.observed import Reachability
from rljob_testing import local_servers
from rljob_testing.operator import ray_polling

RUNNING = '{"status": "RUNNING", "driver_node_id": "head", "message": "MESSAGE"}'
FAILED = RUNNING.replace("RUNNING", "FAILED")


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("/api/v0/nodes", "`nodes` is too large (600000 bytes, at most 69632)"),
        ("/api/jobs/job-1-1", "`job` is too large (600000 bytes, at most 262144)"),
        ("/api/v0/placement_groups", "`placement_groups` is too large (600000 bytes, at most 114688)"),
    ],
)
def test_each_request_has_its_budget(path: str, seen: str) -> None:
    async def test() -> None:
        answers = {**FEW_BYTES, path: ray_polling.ok("x" * 600_000)}
        async with ray_polling.answering(answers) as large:
            found = await ray_polling.observe_without_memory(large, "job-1-1")
            assert found.reachability is Reachability.UNREACHABLE
            assert seen in (found.error or "")

    asyncio.run(asyncio.wait_for(test(), 240))


FEW_BYTES = {
    "/api/v0/nodes": ray_polling.node("0"),
    "/api/jobs/job-1-1": ray_polling.ok(RUNNING),
    "/api/v0/placement_groups": ray_polling.ok("{}"),
    "/api/v0/logs": b"HTTP/1.1 500 No\r\nContent-Length: 26\r\n\r\nA file is not found at: /x",
}


def test_the_longest_message_of_ray_is_within_the_budget_of_a_job() -> None:
    async def test() -> None:
        answers = {
            **FEW_BYTES,
            "/api/jobs/job-1-1": ray_polling.ok(FAILED.replace("MESSAGE", "\\ud83d\\ude00" * 20_000)),
        }
        async with ray_polling.answering(answers) as verbose:
            found = (await ray_polling.observe_without_memory(verbose, "job-1-1")).job
            assert found is not None
            assert found.message == "\U0001f600" * 16_000

    asyncio.run(asyncio.wait_for(test(), 240))


def test_a_run_state_beyond_its_budget_is_reported_and_the_job_is_still_observed() -> None:
    async def test() -> None:
        async with ray_polling.answering({**FEW_BYTES, "/api/v0/logs": ray_polling.ok("x" * 300_000)}) as large:
            found = await ray_polling.observe_without_memory(large, "job-1-1")
            assert (found.reachability, found.job is not None) == (Reachability.OK, True)
            assert "run state: too long" in (found.run_state_error or "")
            assert "(300000 bytes, at most 262144)" in (found.run_state_error or "")

    asyncio.run(asyncio.wait_for(test(), 240))


@pytest.mark.parametrize(("num_bytes", "end"), [(3_000_000, "x" * 15_996 + "last"), (5_000_000, "at most 4194304)")])
def test_only_the_end_of_a_long_log_is_kept(num_bytes: int, end: str) -> None:
    async def test() -> None:
        is_log = "/api/v0/logs/file?node_id=head&filename=job-driver"
        log = ray_polling.ok("x" * num_bytes + "last")
        answers = {is_log: log, **FEW_BYTES, "/api/jobs/job-1-1": ray_polling.ok(FAILED)}
        async with ray_polling.answering(answers) as verbose:
            found = await ray_polling.observe_without_memory(verbose, "job-1-1")
            assert found.reachability is Reachability.OK
            assert found.log_tail.endswith(end)
            assert len(found.log_tail) <= 16_000

    asyncio.run(asyncio.wait_for(test(), 240))


class CountingSemaphore(asyncio.Semaphore):
    """Counts how many permits are taken at the same time."""

    taken = most = waits = 0

    async def acquire(self) -> Literal[True]:
        self.waits += self.locked()
        await super().acquire()
        self.taken += 1
        self.most = max(self.most, self.taken)
        return True

    def release(self) -> None:
        self.taken -= 1
        super().release()


class SlowHead:
    """A head that sends most of a long response, and the rest only after `unblocked` is set."""

    def __init__(self) -> None:
        self.unblocked = asyncio.Event()
        self.num_asked = 0

    async def respond(self, _: bytes, writer: asyncio.StreamWriter) -> None:
        """Responds to one request."""
        self.num_asked += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 250002\r\n\r\n{" + b" " * 200_000)
        await self.unblocked.wait()
        writer.write(b" " * 50_000 + b"}")


def test_long_responses_of_several_heads_wait_for_each_other_and_short_ones_do_not() -> None:
    """Five heads send what they may, slowly, while another job is polled."""

    async def test() -> None:
        slow = SlowHead()
        port = local_servers.free_port()
        server = await asyncio.start_server(ray_polling.guarded(slow.respond), "127.0.0.1", port)
        async with ray_polling.answering(FEW_BYTES) as good, RayClient(Metrics()) as ray:
            steps = ray._reader._steps = CountingSemaphore(4)
            heads = [ray.dashboard(f"http://127.0.0.1:{port}", "a", [ray_polling.TOKEN]) for _ in range(5)]
            responses = [asyncio.create_task(head.job("job-1-1")) for head in heads]
            while slow.num_asked < 5 or steps.waits < 1:
                await asyncio.sleep(0.01)
            good._reader = ray._reader
            assert (await good.job("job-1-1") or {})["status"] == "RUNNING"
            slow.unblocked.set()
            # The others do not get their bytes before the first one is done.
            assert await asyncio.gather(*responses) == [{}] * 5
            assert (steps.most, steps.taken) == (4, 0)
        server.close()

    asyncio.run(asyncio.wait_for(test(), 240))


REAL_NODE = {
    "node_id": 56 * "a",
    "node_ip": "10.244.122.211",
    "is_head_node": False,
    "state": "ALIVE",
    "state_message": None,
    "node_name": "10.244.122.211",
    "resources_total": {
        "object_store_memory": 40000000000.0,
        "CPU": 192.0,
        "node:10.244.122.211": 1.0,
        "memory": 2000000000000.0,
        "accelerator_type:H100": 1.0,
        "GPU": 8.0,
        "rljob_pool_rollout": 1.0,
    },
    "labels": {
        "ray.io/node-id": 56 * "a",
        "ray.io/node-group": "rollout",
        "ray.io/accelerator-type": "H100",
        "ray.io/availability-zone": "zone-a",
        "ray.io/region": "region",
    },
}


@pytest.mark.parametrize(
    ("num_pods", "entries", "is_accepted"),
    [
        (2, lambda: [REAL_NODE] * 2, True),
        (1025, lambda: [REAL_NODE] * 1025, True),
        # The largest job, of 8 pools of 1,024 nodes.
        (8193, lambda: [REAL_NODE] * 8193, True),
        (2, lambda: [{} for _ in range(3000)], False),
        (2, lambda: [list(range(5000))], False),
        (2, lambda: [dict.fromkeys(map(str, range(5000)), 0)], False),
        (8193, lambda: [[[]] * 200_000], False),
    ],
)
def test_a_listing_with_more_values_than_real_nodes_have_is_not_parsed(
    num_pods: int, entries: Callable[[], list[object]], is_accepted: bool
) -> None:
    async def test() -> None:
        found = entries()
        body = json.dumps({"data": {"result": {"result": found}}}, separators=(",", ":"))
        async with ray_polling.answering({"/api/v0/nodes": ray_polling.ok(body)}) as head:
            if is_accepted:
                assert len(await head.nodes(num_pods)) == len(found)
            else:
                with pytest.raises(LargeResponseError, match="values, at most"):
                    await head.nodes(num_pods)

    asyncio.run(asyncio.wait_for(test(), 240))


def test_placement_groups_of_the_largest_job_are_within_their_budget() -> None:
    bundle = {
        "bundle_id": {"placement_group_id": 36 * "a", "bundle_index": 63},
        "node_id": None,
        "unit_resources": {"CPU": 1.0, "GPU": 1.0, "rljob_pool_rollout": 0.001},
        "label_selector": {},
    }
    stats = {"scheduling_state": "NO_RESOURCES", "scheduling_attempt": 3, "end_to_end_creation_latency_ms": 0.0}
    group = {"placement_group_id": 36 * "a", "name": "rollout", "state": "PENDING", "stats": stats}

    async def test() -> None:
        body = json.dumps({"data": {"result": {"result": [{**group, "bundles": [bundle] * 64}] * 64}}})
        async with ray_polling.answering({"/api/v0/placement_groups": ray_polling.ok(body)}) as head:
            assert len(await head.pending_groups(8193)) == 64

    asyncio.run(asyncio.wait_for(test(), 240))


def test_long_responses_of_one_namespace_do_not_delay_those_of_another() -> None:
    """Ten heads of one namespace do not finish their responses; together these are longer than all that is read at the
    same time. A long response to a job of another namespace is still read."""

    async def test() -> None:
        slow = SlowHead()
        server = await asyncio.start_server(ray_polling.guarded(slow.respond), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        body = {"/api/jobs": ray_polling.ok(RUNNING.replace("MESSAGE", 200_000 * "x"))}
        async with ray_polling.answering(body) as good, RayClient(Metrics()) as ray:
            steps = ray._reader._steps = CountingSemaphore(15)
            heads = [ray.dashboard(url, "a", [ray_polling.TOKEN]) for _ in range(10)]
            responses = [asyncio.create_task(head.job("job-1-1")) for head in heads]
            while slow.num_asked < 10 or steps.taken < 12:
                await asyncio.sleep(0.01)
            good._reader, good._namespace = ray._reader, "b"
            found = await good.job("job-1-1") or {}
            assert found["status"] == "RUNNING"
            for response in responses:
                response.cancel()
            await asyncio.gather(*responses, return_exceptions=True)
            assert steps.taken == 0
            slow.unblocked.set()
        server.close()

    asyncio.run(asyncio.wait_for(test(), 240))


def test_a_long_response_that_stops_soon_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_budgets, "LONG_RESPONSE_SECONDS", 0.05)

    async def test() -> None:
        slow = SlowHead()
        server = await asyncio.start_server(ray_polling.guarded(slow.respond), "127.0.0.1", 0)
        async with ray_polling.connected(server.sockets[0].getsockname()[1], ray_polling.TOKEN) as head:
            steps = head._reader._steps = CountingSemaphore(4)
            with pytest.raises(DashboardUnreachableError, match=r"`job` is too slow \(more than 0.05 s after"):
                await head.job("job-1-1")
            assert (steps.most, steps.taken) == (3, 0)
            slow.unblocked.set()
        server.close()

    asyncio.run(asyncio.wait_for(test(), 240))
