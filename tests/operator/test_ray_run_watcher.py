"""How few requests observe a running job completely."""

from __future__ import annotations

import pytest

from rljob_operator.ray.client import DashboardOpenError
from rljob_operator.ray.run_watcher import RunWatcher
from rljob_operator.reconcile.observed import ObservedRay, ObservedRayNode, RayJobStatus, Reachability
from rljob_testing.operator import ray_polling


def test_before_a_submission_nodes_and_one_authentication_probe_are_requested() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        seen = await place.poll(None)
        assert seen == ObservedRay(Reachability.OK, nodes=(ObservedRayNode(True, 0), ObservedRayNode(False, 8)))
        await place.poll(None)
        assert place.ray.take_requests() == ["probe", "nodes", "nodes"]
        await place.watcher.observe("uid", place.dashboard("of another cluster"), None)
        assert place.ray.take_requests() == ["probe", "nodes"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(), test)


def test_a_running_trainer_costs_one_request_per_poll_on_one_connection() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        whole = await place.poll()
        assert place.ray.take_requests() == ["probe", "nodes", "job", "state"]
        assert whole.job is not None
        assert (whole.job.status, whole.nodes) == (
            RayJobStatus.RUNNING,
            (ObservedRayNode(True, 0), ObservedRayNode(False, 8)),
        )
        # The run state does not change, so Ray is asked for the process in between.
        assert await place.polled_requests(5) == [["state"], ["job"], ["state"], ["job"], ["state"]]
        place.ray.take_requests()
        assert await place.poll() == whole
        for step in (2, 3, 4):
            place.ray.state = ray_polling.state("Running", step)
            seen = await place.poll()
            assert seen.run_state is not None
            assert (seen.run_state.progress.step, seen.job, seen.nodes) == (step, whole.job, whole.nodes)
        assert place.ray.take_requests() == ["job", "state", "state", "state"]
        assert place.ray.num_connections == 1

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_a_starting_trainer_is_polled_with_its_placement_groups_every_half_minute() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        assert (await place.poll()).infeasible_groups == ()
        assert place.ray.take_requests() == ["probe", "nodes", "job", "state", "placement_groups"]
        place.ray.groups.append(ray_polling.INFEASIBLE)
        place.ray.state = ray_polling.state("Starting", 0)
        place.now += 29
        assert (await place.poll()).infeasible_groups == ()
        assert place.ray.take_requests() == ["job", "state"]
        place.now += 1
        assert (await place.poll()).infeasible_groups == ("rollout: 1 x {GPU: 8}",)
        assert place.ray.take_requests() == ["job", "state", "placement_groups"]
        assert (await place.poll()).infeasible_groups == ("rollout: 1 x {GPU: 8}",)
        assert place.ray.take_requests() == ["job", "state"]
        place.ray.state = ray_polling.state("Running", 0)
        assert (await place.poll()).infeasible_groups == ()
        assert await place.polled_requests(1) == [["state"]]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(), test)


@pytest.mark.parametrize(("phase", "status"), [("Failed", "FAILED"), ("Complete", "FAILED"), ("Stopped", "STOPPED")])
def test_a_final_run_state_is_followed_up_in_the_same_poll(phase: str, status: str) -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        await place.poll()
        place.ray.status, place.ray.state, place.ray.log = status, ray_polling.state(phase), "Traceback"
        place.ray.take_requests()
        seen = await place.poll()
        assert place.ray.take_requests() == ["state", "job", "state", "log"]
        assert seen.job is not None
        assert seen.run_state is not None
        assert (seen.job.status, seen.run_state.phase, seen.log_tail) == (status, phase, "Traceback")
        assert await place.poll() == seen
        assert place.ray.take_requests() == ["nodes", "job", "state", "log"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_a_finished_trainer_that_still_runs_is_polled_with_its_run_state() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        await place.poll()
        place.ray.state = ray_polling.state("Complete", 4)
        assert await place.polled_requests(3) == [["state", "job", "state"], ["job", "state"], ["job", "state"]]
        place.ray.status = "SUCCEEDED"
        seen = await place.poll()
        assert seen.job is not None
        assert (seen.job.status, seen.log_tail) == (RayJobStatus.SUCCEEDED, "")

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_a_process_without_a_final_run_state_is_noticed_in_the_second_poll() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        await place.poll()
        place.ray.status, place.ray.log = "FAILED", "Killed"
        place.ray.take_requests()
        assert (await place.poll()).log_tail == ""
        assert (await place.poll()).log_tail == "Killed"
        assert place.ray.take_requests() == ["state", "job", "state", "log"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_a_failed_light_poll_is_followed_by_a_full_one_at_once() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        await place.poll()
        place.ray.failing = {"state"}
        place.ray.take_requests()
        seen = await place.poll()
        assert place.ray.take_requests() == ["state", "nodes", "job", "state"]
        assert (seen.reachability, seen.error) == (Reachability.UNREACHABLE, "HTTP 503: busy")
        place.ray.failing = set()
        assert await place.polled_requests(2) == [["nodes", "job", "state"], ["state"]]
        place.ray.status = None
        place.ray.take_requests()
        seen = await place.poll()
        assert (seen.reachability, seen.job, seen.run_state) == (Reachability.OK, None, None)
        assert place.ray.take_requests() == ["job", "nodes", "job"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_another_submission_gets_a_full_poll() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        await place.poll()
        place.ray.take_requests()
        seen = await place.poll("job-1-2")
        assert seen.job is not None
        assert seen.job.submission_id == "job-1-2"
        assert place.ray.take_requests()[:2] == ["nodes", "job"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_nodes_are_also_polled_every_minute() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        await place.poll()
        place.ray.nodes = [ray_polling.HEAD]
        place.now += 59
        assert len((await place.poll()).nodes) == 2
        place.now += 1
        place.ray.take_requests()
        assert (await place.poll()).nodes == (ObservedRayNode(True, 0),)
        assert place.ray.take_requests() == ["nodes", "job"]
        assert await place.polled_requests(2) == [["state"], ["job"]]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_polls_more_than_a_minute_apart_are_full() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        await place.poll()
        for step in (1, 2):
            place.now += 61
            place.ray.state = ray_polling.state("Running", step)
            await place.poll()
            place.now += 61
            seen = (await place.poll()).run_state
            assert seen is not None
            assert seen.progress.step == step
        place.ray.status, place.ray.exit_code = "FAILED", 2
        place.now += 61
        await place.poll()
        place.now += 61
        ended = (await place.poll()).job
        assert ended is not None
        assert (ended.status, ended.exit_code) == (RayJobStatus.FAILED, 2)

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_an_unreadable_run_state_is_reported_and_still_polled() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        place.ray.state = '{"contractVersion": 99}'
        seen = await place.poll()
        assert (seen.reachability, seen.run_state) == (Reachability.OK, None)
        assert "contract versions 1 to 2 (seen: 99)" in (seen.run_state_error or "")
        assert await place.polled_requests(2) == [["state"], ["job"]]
        place.ray.state = "x" * 70_000
        assert "70000 characters" in ((await place.poll()).run_state_error or "")
        place.ray.state = ray_polling.state("Running", 3)
        seen = await place.poll()
        assert seen.run_state is not None
        assert (seen.run_state.progress.step, seen.run_state_error) == (3, None)

    ray_polling.run_with_dashboard(ray_polling.FakeRay(), test)


def test_silence_counts_from_the_first_failed_poll_of_this_cluster() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        place.ray.failing = {"nodes"}
        silent = []
        for seconds in (0.0, 7.0, 13.0):
            place.now += seconds
            silent.append((await place.poll()).silent_seconds)
        assert silent == [0.0, 7.0, 20.0]
        other = await place.watcher.observe("uid", place.dashboard("of another cluster"), None)
        assert (other.reachability, other.silent_seconds) == (Reachability.UNREACHABLE, 0.0)
        place.now += 5
        place.ray.failing = set()
        assert (await place.poll()).silent_seconds == 0.0
        place.now += 5
        place.ray.failing = {"nodes", "state"}
        assert (await place.poll()).silent_seconds == 0.0
        place.now += 2
        place.watcher.forget("uid")
        assert (await place.poll()).silent_seconds == 0.0

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)


def test_a_slow_poll_counts_as_silence_for_its_duration() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        ticks = iter((1000.0, 1004.0))
        watcher = RunWatcher(lambda: next(ticks))
        seen = await watcher.observe("uid", place.dashboard(), None)
        assert (seen.reachability, seen.silent_seconds) == (Reachability.UNREACHABLE, 4.0)

    ray_polling.run_with_dashboard(ray_polling.FakeRay(failing={"nodes"}), test)


def test_a_dashboard_without_authentication_is_reported_and_gets_no_token() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        seen = await place.poll(None)
        assert seen.reachability is Reachability.OPEN
        assert "without a token" in (seen.error or "")
        with pytest.raises(DashboardOpenError):
            await place.dashboard().submit({"submission_id": ray_polling.SUBMISSION})
        assert place.ray.take_requests() == ["probe", "probe"]
        place.now += 9
        assert (await place.poll(None)).silent_seconds == 9.0
        place.ray.guarded = True
        assert (await place.poll(None)).reachability is Reachability.OK
        await place.dashboard().submit({"submission_id": ray_polling.SUBMISSION})
        assert place.ray.take_requests() == ["probe", "probe", "nodes", "probe", "submit"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(guarded=False), test)


def test_a_rejected_token_proves_nothing_for_other_tokens() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        place.ray.rejecting = True
        assert (await place.poll(None)).reachability is Reachability.REJECTED
        # A rejection comes twice: the second time on a connection that ends with it.
        assert place.ray.take_requests() == ["probe", "nodes", "nodes"]
        place.ray.rejecting, place.ray.guarded = False, False
        assert (await place.poll(None)).reachability is Reachability.OPEN
        assert place.ray.take_requests() == ["probe"]

    ray_polling.run_with_dashboard(ray_polling.FakeRay(), test)


def test_an_unclear_response_to_the_probe_proves_nothing() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        seen = await place.poll(None)
        assert (seen.reachability, place.ray.take_requests()) == (Reachability.UNREACHABLE, ["probe"])
        assert "HTTP 503" in (seen.error or "")
        place.ray.failing = set()
        assert (await place.poll(None)).reachability is Reachability.OK

    ray_polling.run_with_dashboard(ray_polling.FakeRay(failing={"probe"}), test)


def test_a_new_watcher_sees_the_same_as_the_third_poll() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
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
        for place.ray.status, place.ray.state in moments:
            place.now += 30
            # Nodes, run state and process take one poll each if all are due.
            await place.poll()
            await place.poll()
            remembering = await place.poll()
            forgetful = await RunWatcher(lambda: place.now).observe("uid", place.dashboard(), ray_polling.SUBMISSION)
            assert remembering == forgetful

    ray_polling.run_with_dashboard(ray_polling.FakeRay(groups=[ray_polling.INFEASIBLE], log="last words"), test)


def test_a_missing_stack_writer_costs_one_request_while_it_matters() -> None:
    async def test(place: ray_polling.WatchedDashboard) -> None:
        assert not (await place.poll()).stacks_missing
        place.ray.take_requests()
        seen = await place.watcher.observe("uid", place.dashboard(), ray_polling.SUBMISSION, ray_polling.STACKS)
        assert (place.ray.take_requests(), seen.stacks_missing) == (["state", "stacks"], True)
        place.ray.has_stacks = True
        seen = await place.watcher.observe("uid", place.dashboard(), ray_polling.SUBMISSION, ray_polling.STACKS)
        assert (place.ray.take_requests(), seen.stacks_missing) == (["job", "stacks"], False)
        place.ray.failing.add("stacks")
        seen = await place.watcher.observe("uid", place.dashboard(), ray_polling.SUBMISSION, ray_polling.STACKS)
        # The rest is still known if this is not.
        assert (seen.reachability, seen.stacks_missing) == (Reachability.OK, False)
        assert seen.job is not None

    ray_polling.run_with_dashboard(ray_polling.FakeRay(state=ray_polling.state("Running")), test)
