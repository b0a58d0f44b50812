"""The client of Ray's dashboard on a real Ray with token authentication: the behaviour that the stand-in of other tests
imitates."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from rljob_api.constants import run_state_file_name
from rljob_api.contract_documents import dump_run_state
from rljob_operator.manifests.pod_environment import FORBIDDEN_VARIABLES
from rljob_operator.manifests.ray_submission import submission as manifest_of_submission
from rljob_operator.ray.client import DashboardOpenError, RayRefusedError, TokenRejectedError
from rljob_operator.reconcile.observed import ObservedRay, ObservedRayNode, RayJobStatus, Reachability
from rljob_testing.operator import inputs, ray_polling
from rljob_testing.ray_clusters import local_ray

SUBMITTED = ("RLJOB_ATTEMPT", "RLJOB_START_NUMBER", "RLJOB_RUN_STATE_FILE", "RAY_JOB_STOP_WAIT_TIME_S")
"""Variables that pods do not get: they come with each submission."""
PLACEMENT = """
import ray, time
ray.init()
ray.util.placement_group([{"GPU": 8, "CPU": 1}] * 2, strategy="STRICT_SPREAD", name="rollout")
time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[local_ray.RayCluster]:
    """A head and two workers with one declared GPU each, in pods whose job names a Secret full of our own variables."""
    variables = {**FORBIDDEN_VARIABLES, **dict.fromkeys(SUBMITTED, "from a Secret")}
    with local_ray.pod_cluster(tmp_path_factory.mktemp("ray"), ray_polling.TOKEN, variables) as cluster:
        yield cluster


async def poll_until(ask: Callable[[], Awaitable[ObservedRay]], wanted: Callable[[ObservedRay], bool]) -> ObservedRay:
    """Polls until the condition holds."""
    while not wanted(seen := await ask()):
        await asyncio.sleep(0.3)
    return seen


def submission(name: str, entrypoint: str, **variables: str) -> dict[str, object]:
    return {"submission_id": name, "entrypoint": entrypoint, "runtime_env": {"env_vars": variables}}


@pytest.mark.ray
def test_nodes_are_read_with_a_token(cluster: local_ray.RayCluster) -> None:
    async def test() -> None:
        async with ray_polling.connected(cluster.port, ray_polling.TOKEN) as allowed:
            seen = await ray_polling.observe_without_memory(allowed, "nobody-1-1")
            assert (seen.reachability, seen.job, seen.run_state) == (Reachability.OK, None, None)
            assert sorted(seen.nodes, key=lambda node: node.is_head) == [
                ObservedRayNode(is_head=False, num_gpus=1),
                ObservedRayNode(is_head=False, num_gpus=1),
                ObservedRayNode(is_head=True, num_gpus=0),
            ]
            await allowed.stop("nobody-1-1")
        async with ray_polling.connected(cluster.port, "b" * 64, ray_polling.TOKEN) as second_token:
            assert (await ray_polling.observe_without_memory(second_token, None)).reachability is Reachability.OK
        async with ray_polling.connected(cluster.port, "b" * 64) as rejected:
            seen = await ray_polling.observe_without_memory(rejected, None)
            assert seen.reachability is Reachability.REJECTED
            with pytest.raises(TokenRejectedError, match="rejects the token"):
                await rejected.submit(submission("x", "true"))

    asyncio.run(asyncio.wait_for(test(), 240))


@pytest.mark.ray
def test_a_trainer_that_fails_after_writing_its_run_state_is_reported(
    cluster: local_ray.RayCluster, tmp_path: Path
) -> None:
    async def test() -> None:
        (tmp_path / "state.json").write_text(dump_run_state(inputs.run_state(step=2)))
        go_on = tmp_path / "go-on"
        there = cluster.log_folder / run_state_file_name("job-1-1")
        entrypoint = (
            f"cp {tmp_path}/state.json {there}; while [ ! -e {go_on} ]; do sleep 0.1; done;"
            " for i in $(seq 200); do echo line $i; done; exit 75"
        )
        async with ray_polling.connected(cluster.port, ray_polling.TOKEN) as allowed:
            await allowed.submit(submission("job-1-1", entrypoint))
            with pytest.raises(RayRefusedError, match="already exists"):
                await allowed.submit(submission("job-1-1", entrypoint))
            assert await allowed.job("job-1-1") is not None
            seen = await poll_until(
                lambda: ray_polling.observe_without_memory(allowed, "job-1-1"),
                lambda seen: seen.run_state is not None,
            )
            assert seen.job is not None
            assert seen.job.status is RayJobStatus.RUNNING
            assert seen.run_state is not None
            assert (seen.run_state.progress.step, seen.log_tail) == (2, "")
            go_on.touch()
            seen = await poll_until(
                lambda: ray_polling.observe_without_memory(allowed, "job-1-1"),
                lambda seen: seen.job is not None and seen.job.status.has_ended,
            )
            assert seen.job is not None
            assert (seen.job.status, seen.job.exit_code) == (RayJobStatus.FAILED, 75)
            assert seen.job.error_type == "JOB_ENTRYPOINT_COMMAND_ERROR"
            assert seen.log_tail.splitlines()[-2:] == ["line 199", "line 200"]
            assert len(seen.log_tail.splitlines()) == 50
            await allowed.stop("job-1-1")

    asyncio.run(asyncio.wait_for(test(), 240))


@pytest.mark.ray
def test_variables_of_the_submission_override_those_of_the_pod(cluster: local_ray.RayCluster, tmp_path: Path) -> None:
    async def test() -> None:
        seen = tmp_path / "seen"
        body = manifest_of_submission(inputs.IDENTITY, inputs.spec(), "variables-1-1", attempt=1, start_number=7)
        async with ray_polling.connected(cluster.port, ray_polling.TOKEN) as allowed:
            await allowed.submit(body | {"entrypoint": f"exec env -0 > {seen}"})
            end = await poll_until(
                lambda: ray_polling.observe_without_memory(allowed, "variables-1-1"),
                lambda seen: seen.job is not None and seen.job.status.has_ended,
            )
            assert end.job is not None
            assert end.job.status is RayJobStatus.SUCCEEDED
        variables = dict(entry.split("=", 1) for entry in seen.read_text().split("\0") if entry)
        assert {name: variables[name] for name in SUBMITTED} == {
            "RLJOB_ATTEMPT": "1",
            "RLJOB_START_NUMBER": "7",
            "RLJOB_RUN_STATE_FILE": "/tmp/ray/session_latest/logs/rljob-run-state-variables-1-1.json",
            "RAY_JOB_STOP_WAIT_TIME_S": "110",
        }
        # Empty values harm neither Ray nor the shells and programs that it starts.
        assert {name: variables[name] for name in FORBIDDEN_VARIABLES} == dict(FORBIDDEN_VARIABLES)

    asyncio.run(asyncio.wait_for(test(), 240))


@pytest.mark.ray
def test_disabled_hooks_do_nothing(cluster: local_ray.RayCluster) -> None:
    """The hooks of a start and of a runtime environment were called before any other test here was run."""
    headers = {"Authorization": f"Bearer {ray_polling.TOKEN}"}
    url = f"http://127.0.0.1:{cluster.port}/api/component_activities"
    groups_by_job = httpx.get(url, headers=headers, timeout=30, trust_env=False).raise_for_status().json()
    assert list(groups_by_job) == ["driver"]
    assert groups_by_job["driver"]["is_active"] in ("ACTIVE", "INACTIVE")


@pytest.mark.ray
def test_a_ray_without_authentication_gets_no_job(tmp_path: Path) -> None:
    async def test() -> None:
        # A home of its own, because Ray requires a token if it finds one there.
        with local_ray.pod_cluster(tmp_path, "", {"HOME": str(tmp_path)}, num_workers=0) as open_cluster:
            async with ray_polling.connected(open_cluster.port, ray_polling.TOKEN) as unguarded:
                seen = await ray_polling.observe_without_memory(unguarded, None)
                assert seen.reachability is Reachability.OPEN
                assert seen.nodes == ()
                with pytest.raises(DashboardOpenError, match="accepts requests without a token"):
                    await unguarded.submit(submission("open-1-1", "true"))
                assert await unguarded.job("open-1-1") is None

    asyncio.run(asyncio.wait_for(test(), 240))


@pytest.mark.ray
def test_an_infeasible_placement_group_is_reported_and_a_stop_arrives(
    cluster: local_ray.RayCluster, tmp_path: Path
) -> None:
    async def test() -> None:
        (tmp_path / "place.py").write_text(PLACEMENT)
        async with ray_polling.connected(cluster.port, ray_polling.TOKEN) as allowed:
            entrypoint = f"exec python {tmp_path}/place.py"
            await allowed.submit(submission("big-1-1", entrypoint, RAY_JOB_STOP_WAIT_TIME_S="5"))
            seen = await poll_until(
                lambda: ray_polling.observe_without_memory(allowed, "big-1-1"),
                lambda seen: seen.infeasible_groups != (),
            )
            assert seen.infeasible_groups == ("rollout: 2 x {CPU: 1, GPU: 8}",)
            await allowed.stop("big-1-1")
            seen = await poll_until(
                lambda: ray_polling.observe_without_memory(allowed, "big-1-1"),
                lambda seen: seen.job is not None and seen.job.status.has_ended,
            )
            assert seen.job is not None
            assert seen.job.status is RayJobStatus.STOPPED

    asyncio.run(asyncio.wait_for(test(), 240))
