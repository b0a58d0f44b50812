"""How few requests observe a running job completely."""

from __future__ import annotations

import pytest

from rljob_operator.ray.client import DashboardOpenError
from rljob_operator.ray.run_watcher import RunWatcher
from rljob_operator.reconcile.observed import ObservedRay, ObservedRayNode, RayJobStatus, Reachability
from rljob_testing.operator import ray_polling


def test_before_a_submission_nodes_and_one_authentication_probe_are_requested() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        seen = await watched.poll(None)
        assert seen == ObservedRay(Reachability.OK, nodes=(ObservedRayNode(True, 0), ObservedRayNode(False, 8)))
        await watched.poll(None)
        assert watched.ray.take_requests() == ["probe", "nodes", "nodes"]
        await watched.watcher.observe(
            "uid", watched.dashboard("of another cluster"), None, num_pods=ray_polling.NUM_PODS
        )
        assert watched.ray.take_requests() == ["probe", "nodes"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(), test)


def test_a_running_trainer_costs_one_request_per_poll_on_one_connection() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        whole = await watched.poll()
        assert watched.ray.take_requests() == ["probe", "nodes", "job", "state"]
        assert whole.job is not None
        assert (whole.job.status, whole.nodes) == (
            RayJobStatus.RUNNING,
            (ObservedRayNode(True, 0), ObservedRayNode(False, 8)),
        )
        # The run state does not change, so Ray is asked for the process in between.
        assert await watched.polled_requests(5) == [["state"], ["job"], ["state"], ["job"], ["state"]]
        watched.ray.take_requests()
        assert await watched.poll() == whole
        for step in (2, 3, 4):
            watched.ray.state = ray_polling.state("Running", step)
            seen = await watched.poll()
            assert seen.run_state is not None
            assert (seen.run_state.progress.step, seen.job, seen.nodes) == (step, whole.job, whole.nodes)
        assert watched.ray.take_requests() == ["job", "state", "state", "state"]
        assert watched.ray.num_connections == 1

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_a_starting_trainer_is_polled_with_its_placement_groups_every_half_minute() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        assert (await watched.poll()).infeasible_groups == ()
        assert watched.ray.take_requests() == ["probe", "nodes", "job", "state", "placement_groups"]
        watched.ray.groups.append(ray_polling.INFEASIBLE)
        watched.ray.state = ray_polling.state("Starting", 0)
        watched.now += 29
        assert (await watched.poll()).infeasible_groups == ()
        assert watched.ray.take_requests() == ["job", "state"]
        watched.now += 1
        assert (await watched.poll()).infeasible_groups == ("rollout: 1 x {GPU: 8}",)
        assert watched.ray.take_requests() == ["job", "state", "placement_groups"]
        assert (await watched.poll()).infeasible_groups == ("rollout: 1 x {GPU: 8}",)
        assert watched.ray.take_requests() == ["job", "state"]
        watched.ray.state = ray_polling.state("Running", 0)
        assert (await watched.poll()).infeasible_groups == ()
        assert await watched.polled_requests(1) == [["state"]]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(), test)


@pytest.mark.parametrize(("phase", "status"), [("Failed", "FAILED"), ("Complete", "FAILED"), ("Stopped", "STOPPED")])
def test_a_final_run_state_is_followed_up_in_the_same_poll(phase: str, status: str) -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        await watched.poll()
        watched.ray.status, watched.ray.state, watched.ray.log = status, ray_polling.state(phase), "Traceback"
        watched.ray.take_requests()
        seen = await watched.poll()
        assert watched.ray.take_requests() == ["state", "job", "state", "log"]
        assert seen.job is not None
        assert seen.run_state is not None
        assert (seen.job.status, seen.run_state.phase, seen.log_tail) == (status, phase, "Traceback")
        assert await watched.poll() == seen
        assert watched.ray.take_requests() == ["nodes", "job", "state", "log"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_a_finished_trainer_that_still_runs_is_polled_with_its_run_state() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        await watched.poll()
        watched.ray.state = ray_polling.state("Complete", 4)
        assert await watched.polled_requests(3) == [["state", "job", "state"], ["job", "state"], ["job", "state"]]
        watched.ray.status = "SUCCEEDED"
        seen = await watched.poll()
        assert seen.job is not None
        assert (seen.job.status, seen.log_tail) == (RayJobStatus.SUCCEEDED, "")

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_a_process_without_a_final_run_state_is_noticed_in_the_second_poll() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        await watched.poll()
        watched.ray.status, watched.ray.log = "FAILED", "Killed"
        watched.ray.take_requests()
        assert (await watched.poll()).log_tail == ""
        assert (await watched.poll()).log_tail == "Killed"
        assert watched.ray.take_requests() == ["state", "job", "state", "log"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_a_failed_light_poll_is_followed_by_a_full_one_at_once() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        await watched.poll()
        watched.ray.failing = {"state"}
        watched.ray.take_requests()
        seen = await watched.poll()
        assert watched.ray.take_requests() == ["state", "nodes", "job", "state"]
        assert (seen.reachability, seen.error) == (Reachability.UNREACHABLE, "HTTP 503: busy")
        watched.ray.failing = set()
        assert await watched.polled_requests(2) == [["nodes", "job", "state"], ["state"]]
        watched.ray.status = None
        watched.ray.take_requests()
        seen = await watched.poll()
        assert (seen.reachability, seen.job, seen.run_state) == (Reachability.OK, None, None)
        assert watched.ray.take_requests() == ["job", "nodes", "job"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_another_submission_gets_a_full_poll() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        await watched.poll()
        watched.ray.take_requests()
        seen = await watched.poll("job-1-2")
        assert seen.job is not None
        assert seen.job.submission_id == "job-1-2"
        assert watched.ray.take_requests()[:2] == ["nodes", "job"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_nodes_are_also_polled_every_minute() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        await watched.poll()
        watched.ray.nodes = [ray_polling.HEAD]
        watched.now += 59
        assert len((await watched.poll()).nodes) == 2
        watched.now += 1
        watched.ray.take_requests()
        assert (await watched.poll()).nodes == (ObservedRayNode(True, 0),)
        assert watched.ray.take_requests() == ["nodes", "job"]
        assert await watched.polled_requests(2) == [["state"], ["job"]]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_polls_more_than_a_minute_apart_are_full() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        await watched.poll()
        for step in (1, 2):
            watched.now += 61
            watched.ray.state = ray_polling.state("Running", step)
            await watched.poll()
            watched.now += 61
            seen = (await watched.poll()).run_state
            assert seen is not None
            assert seen.progress.step == step
        watched.ray.status, watched.ray.exit_code = "FAILED", 2
        watched.now += 61
        await watched.poll()
        watched.now += 61
        ended = (await watched.poll()).job
        assert ended is not None
        assert (ended.status, ended.exit_code) == (RayJobStatus.FAILED, 2)

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_an_unreadable_run_state_is_reported_and_still_polled() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        watched.ray.state = '{"contractVersion": 99}'
        seen = await watched.poll()
        assert (seen.reachability, seen.run_state) == (Reachability.OK, None)
        assert "contract versions 1 to 2 (seen: 99)" in (seen.run_state_error or "")
        assert await watched.polled_requests(2) == [["state"], ["job"]]
        watched.ray.state = "x" * 70_000
        assert "70000 characters" in ((await watched.poll()).run_state_error or "")
        watched.ray.state = ray_polling.state("Running", 3)
        seen = await watched.poll()
        assert seen.run_state is not None
        assert (seen.run_state.progress.step, seen.run_state_error) == (3, None)

    ray_polling.run_with_dashboard(ray_polling.FakeRay(), test)


def test_an_empty_response_with_the_run_state_is_requested_again() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        for is_first_poll in (True, False):
            watched.ray.num_empty = 1
            seen = await watched.poll()
            assert (seen.run_state is not None, seen.run_state_error) == (True, None), is_first_poll
        watched.ray.num_empty = 9
        await watched.poll()
        seen = await watched.poll()
        assert (seen.reachability, seen.run_state_error) == (Reachability.UNREACHABLE, None)
        assert seen.error == "the response with the run state is empty"

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_silence_counts_from_the_first_failed_poll_of_this_cluster() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        watched.ray.failing = {"nodes"}
        silent = []
        for seconds in (0.0, 7.0, 13.0):
            watched.now += seconds
            silent.append((await watched.poll()).silent_seconds)
        assert silent == [0.0, 7.0, 20.0]
        other = await watched.watcher.observe(
            "uid", watched.dashboard("of another cluster"), None, num_pods=ray_polling.NUM_PODS
        )
        assert (other.reachability, other.silent_seconds) == (Reachability.UNREACHABLE, 0.0)
        watched.now += 5
        watched.ray.failing = set()
        assert (await watched.poll()).silent_seconds == 0.0
        watched.now += 5
        watched.ray.failing = {"nodes", "state"}
        assert (await watched.poll()).silent_seconds == 0.0
        watched.now += 2
        watched.watcher.forget("uid")
        assert (await watched.poll()).silent_seconds == 0.0

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_a_failing_dashboard_is_polled_less_and_less_often_until_it_responds() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        polled_after = []
        watched.ray.failing = {"nodes"}
        for seconds in range(0, 600, 4):
            seen = await watched.poll(at_once=False)
            assert (seen.reachability, seen.error, seen.silent_seconds) == (
                Reachability.UNREACHABLE,
                "HTTP 503: busy",
                seconds,
            )
            if watched.ray.take_requests():
                polled_after.append(seconds)
            assert watched.watcher.is_waiting("uid") is (seconds > 0)
            watched.now += 4
        assert polled_after == [0, 4, 8, 12, 20, 32, 48, 72, 108, 164, 224, 284, 344, 404, 464, 524, 584]
        watched.ray.failing = set()
        assert (await watched.poll(at_once=False)).reachability is Reachability.UNREACHABLE
        assert (await watched.poll(at_once=True)).reachability is Reachability.OK
        assert not watched.watcher.is_waiting("uid")
        watched.ray.failing = {"job"}
        seen = await watched.poll(at_once=False)
        assert (seen.reachability, seen.silent_seconds) == (Reachability.UNREACHABLE, 0.0)

    ray_polling.run_with_dashboard(ray_polling.FakeRay(), test)


def test_a_failing_dashboard_is_polled_at_once_when_its_head_has_changed() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        watched.ray.failing = {"nodes"}
        await watched.poll()
        watched.now += 100
        await watched.poll()
        watched.ray.take_requests()
        watched.ray.failing = set()
        assert (await watched.poll(at_once=False)).reachability is Reachability.UNREACHABLE
        watched.watcher.poll_soon("uid")
        watched.watcher.poll_soon("unknown")
        assert (await watched.poll(at_once=False)).reachability is Reachability.OK
        assert watched.ray.take_requests() == ["nodes", "job", "state", "placement_groups"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(), test)


def test_a_slow_poll_counts_as_silence_for_its_duration() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        ticks = iter((1000.0, 1004.0))
        watcher = RunWatcher(lambda: next(ticks))
        seen = await watcher.observe("uid", watched.dashboard(), None, num_pods=ray_polling.NUM_PODS)
        assert (seen.reachability, seen.silent_seconds) == (Reachability.UNREACHABLE, 4.0)

    ray_polling.run_with_dashboard(ray_polling.FakeRay(failing={"nodes"}), test)


def test_a_dashboard_without_authentication_is_reported_and_gets_no_token() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        seen = await watched.poll(None)
        assert seen.reachability is Reachability.OPEN
        assert "without a token" in (seen.error or "")
        with pytest.raises(DashboardOpenError):
            await watched.dashboard().submit({"submission_id": ray_polling.SUBMISSION})
        assert watched.ray.take_requests() == ["probe", "probe"]
        watched.now += 9
        assert (await watched.poll(None)).silent_seconds == 9.0
        watched.ray.guarded = True
        assert (await watched.poll(None)).reachability is Reachability.OK
        await watched.dashboard().submit({"submission_id": ray_polling.SUBMISSION})
        assert watched.ray.take_requests() == ["probe", "probe", "nodes", "probe", "submit"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(guarded=False), test)


def test_a_rejected_token_proves_nothing_for_other_tokens() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        watched.ray.rejecting = True
        assert (await watched.poll(None)).reachability is Reachability.REJECTED
        # A rejection comes twice: the second time on a connection that ends with it.
        assert watched.ray.take_requests() == ["probe", "nodes", "nodes"]
        watched.ray.rejecting, watched.ray.guarded = False, False
        assert (await watched.poll(None)).reachability is Reachability.OPEN
        assert watched.ray.take_requests() == ["probe"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(), test)


def test_an_unclear_response_to_the_probe_proves_nothing() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        seen = await watched.poll(None)
        assert (seen.reachability, watched.ray.take_requests()) == (Reachability.UNREACHABLE, ["probe"])
        assert "HTTP 503" in (seen.error or "")
        watched.ray.failing = set()
        assert (await watched.poll(None)).reachability is Reachability.OK

    ray_polling.run_with_dashboard(ray_polling.FakeRay(failing={"probe"}), test)


def test_a_new_watcher_sees_the_same_as_the_third_poll() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        moments = [
            ("PENDING", None),
            ("RUNNING", None),
            ("RUNNING", ray_polling.state("Starting", 0)),
            *(("RUNNING", ray_polling.state("Running", step)) for step in (0, 1, 2)),
            ("RUNNING", "damaged"),
            ("RUNNING", ray_polling.state("Running", 3)),
            ("RUNNING", ray_polling.state("Stopping", 3)),
            ("RUNNING", ray_polling.state("Stopped", 3)),
            ("STOPPED", ray_polling.state("Stopped", 3)),
            (None, None),
            ("RUNNING", ray_polling.state("Running", 3)),
            ("FAILED", ray_polling.state("Running", 3)),
        ]
        for watched.ray.status, watched.ray.state in moments:
            watched.now += 30
            # Nodes, run state and process take one poll each if all are due.
            await watched.poll()
            await watched.poll()
            remembering = await watched.poll()
            forgetful = await RunWatcher(lambda: watched.now).observe(
                "uid", watched.dashboard(), ray_polling.SUBMISSION, num_pods=ray_polling.NUM_PODS
            )
            assert remembering == forgetful

    ray_polling.run_with_dashboard(ray_polling.FakeRay(groups=[ray_polling.INFEASIBLE], log="last words"), test)


def test_a_missing_stack_writer_costs_one_request_while_it_matters() -> None:
    async def test(watched: ray_polling.WatchedDashboard) -> None:
        assert not (await watched.poll()).stacks_missing
        watched.ray.take_requests()
        seen = await watched.watcher.observe(
            "uid", watched.dashboard(), ray_polling.SUBMISSION, ray_polling.STACKS, num_pods=ray_polling.NUM_PODS
        )
        assert (watched.ray.take_requests(), seen.stacks_missing) == (["state", "stacks"], True)
        watched.ray.has_stacks = True
        seen = await watched.watcher.observe(
            "uid", watched.dashboard(), ray_polling.SUBMISSION, ray_polling.STACKS, num_pods=ray_polling.NUM_PODS
        )
        assert (watched.ray.take_requests(), seen.stacks_missing) == (["job", "stacks"], False)
        watched.ray.failing.add("stacks")
        seen = await watched.watcher.observe(
            "uid", watched.dashboard(), ray_polling.SUBMISSION, ray_polling.STACKS, num_pods=ray_polling.NUM_PODS
        )
        # The rest is still known if this is not.
        assert (seen.reachability, seen.stacks_missing) == (Reachability.OK, False)
        assert seen.job is not None

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)
