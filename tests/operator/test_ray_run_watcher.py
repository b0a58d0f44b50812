"""How few requests observe a running job completely."""

from __future__ import annotations

import pytest

from rljob_operator.ray.client import DashboardOpenError
from rljob_operator.ray.run_watcher import RunWatcher
from rljob_operator.reconcile.observed import ObservedRay, ObservedRayNode, RayJobStatus, Reachability
from rljob_testing.operator import watched_dashboard


def test_before_a_submission_nodes_and_one_authentication_probe_are_requested() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        seen = await watched.look(None)
        assert seen == ObservedRay(Reachability.OK, nodes=(ObservedRayNode(True, 0), ObservedRayNode(False, 8)))
        await watched.look(None)
        assert watched.ray.since() == ["probe", "nodes", "nodes"]
        await watched.watcher.observe("uid", watched.dashboard("of another cluster"), None)
        assert watched.ray.since() == ["probe", "nodes"]

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(), test)


def test_a_running_trainer_costs_one_request_per_poll_on_one_connection() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        whole = await watched.look()
        assert watched.ray.since() == ["probe", "nodes", "job", "state"]
        assert whole.job is not None
        assert (whole.job.status, whole.nodes) == (
            RayJobStatus.RUNNING,
            (ObservedRayNode(True, 0), ObservedRayNode(False, 8)),
        )
        # The run state does not change, so Ray is asked for the process in between.
        assert await watched.looks(5) == [["state"], ["job"], ["state"], ["job"], ["state"]]
        watched.ray.since()
        assert await watched.look() == whole
        for step in (2, 3, 4):
            watched.ray.state = watched_dashboard.state("Running", step)
            seen = await watched.look()
            assert seen.run_state is not None
            assert (seen.run_state.progress.step, seen.job, seen.nodes) == (step, whole.job, whole.nodes)
        assert watched.ray.since() == ["job", "state", "state", "state"]
        assert watched.ray.num_connections == 1

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(state=watched_dashboard.state("Running")), test)


def test_a_starting_trainer_is_polled_with_its_placement_groups_every_half_minute() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        assert (await watched.look()).infeasible_groups == ()
        assert watched.ray.since() == ["probe", "nodes", "job", "state", "placement_groups"]
        watched.ray.groups.append(watched_dashboard.INFEASIBLE)
        watched.ray.state = watched_dashboard.state("Starting", 0)
        watched.now += 29
        assert (await watched.look()).infeasible_groups == ()
        assert watched.ray.since() == ["job", "state"]
        watched.now += 1
        assert (await watched.look()).infeasible_groups == ("rollout: 1 x {GPU: 8}",)
        assert watched.ray.since() == ["job", "state", "placement_groups"]
        assert (await watched.look()).infeasible_groups == ("rollout: 1 x {GPU: 8}",)
        assert watched.ray.since() == ["job", "state"]
        watched.ray.state = watched_dashboard.state("Running", 0)
        assert (await watched.look()).infeasible_groups == ()
        assert await watched.looks(1) == [["state"]]

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(), test)


@pytest.mark.parametrize(("phase", "status"), [("Failed", "FAILED"), ("Complete", "FAILED"), ("Stopped", "STOPPED")])
def test_a_final_run_state_is_followed_up_in_the_same_poll(phase: str, status: str) -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        await watched.look()
        watched.ray.status, watched.ray.state, watched.ray.log = status, watched_dashboard.state(phase), "Traceback"
        watched.ray.since()
        seen = await watched.look()
        assert watched.ray.since() == ["state", "job", "state", "log"]
        assert seen.job is not None
        assert seen.run_state is not None
        assert (seen.job.status, seen.run_state.phase, seen.log_tail) == (status, phase, "Traceback")
        assert await watched.look() == seen
        assert watched.ray.since() == ["nodes", "job", "state", "log"]

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(state=watched_dashboard.state("Running")), test)


def test_a_finished_trainer_that_still_runs_is_polled_with_its_run_state() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        await watched.look()
        watched.ray.state = watched_dashboard.state("Complete", 4)
        assert await watched.looks(3) == [["state", "job", "state"], ["job", "state"], ["job", "state"]]
        watched.ray.status = "SUCCEEDED"
        seen = await watched.look()
        assert seen.job is not None
        assert (seen.job.status, seen.log_tail) == (RayJobStatus.SUCCEEDED, "")

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(state=watched_dashboard.state("Running")), test)


def test_a_process_without_a_final_run_state_is_noticed_in_the_second_poll() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        await watched.look()
        watched.ray.status, watched.ray.log = "FAILED", "Killed"
        watched.ray.since()
        assert (await watched.look()).log_tail == ""
        assert (await watched.look()).log_tail == "Killed"
        assert watched.ray.since() == ["state", "job", "state", "log"]

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(state=watched_dashboard.state("Running")), test)


def test_a_failed_light_poll_is_followed_by_a_full_one_at_once() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        await watched.look()
        watched.ray.failing = {"state"}
        watched.ray.since()
        seen = await watched.look()
        assert watched.ray.since() == ["state", "nodes", "job", "state"]
        assert (seen.reachability, seen.error) == (Reachability.UNREACHABLE, "HTTP 503: busy")
        watched.ray.failing = set()
        assert await watched.looks(2) == [["nodes", "job", "state"], ["state"]]
        watched.ray.status = None
        watched.ray.since()
        seen = await watched.look()
        assert (seen.reachability, seen.job, seen.run_state) == (Reachability.OK, None, None)
        assert watched.ray.since() == ["job", "nodes", "job"]

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(state=watched_dashboard.state("Running")), test)


def test_another_submission_gets_a_full_poll() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        await watched.look()
        watched.ray.since()
        seen = await watched.look("job-1-2")
        assert seen.job is not None
        assert seen.job.submission_id == "job-1-2"
        assert watched.ray.since()[:2] == ["nodes", "job"]

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(state=watched_dashboard.state("Running")), test)


def test_nodes_are_also_polled_every_minute() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        await watched.look()
        watched.ray.nodes = [watched_dashboard.HEAD]
        watched.now += 59
        assert len((await watched.look()).nodes) == 2
        watched.now += 1
        watched.ray.since()
        assert (await watched.look()).nodes == (ObservedRayNode(True, 0),)
        assert watched.ray.since() == ["nodes", "job"]
        assert await watched.looks(2) == [["state"], ["job"]]

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(state=watched_dashboard.state("Running")), test)


def test_polls_more_than_a_minute_apart_are_full() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        await watched.look()
        for step in (1, 2):
            watched.now += 61
            watched.ray.state = watched_dashboard.state("Running", step)
            await watched.look()
            watched.now += 61
            seen = (await watched.look()).run_state
            assert seen is not None
            assert seen.progress.step == step
        watched.ray.status, watched.ray.exit_code = "FAILED", 2
        watched.now += 61
        await watched.look()
        watched.now += 61
        ended = (await watched.look()).job
        assert ended is not None
        assert (ended.status, ended.exit_code) == (RayJobStatus.FAILED, 2)

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(state=watched_dashboard.state("Running")), test)


def test_an_unreadable_run_state_is_reported_and_still_polled() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        watched.ray.state = '{"contractVersion": 99}'
        seen = await watched.look()
        assert (seen.reachability, seen.run_state) == (Reachability.OK, None)
        assert "contract versions 1 to 2 (seen: 99)" in (seen.run_state_error or "")
        assert await watched.looks(2) == [["state"], ["job"]]
        watched.ray.state = "x" * 70_000
        assert "70000 characters" in ((await watched.look()).run_state_error or "")
        watched.ray.state = watched_dashboard.state("Running", 3)
        seen = await watched.look()
        assert seen.run_state is not None
        assert (seen.run_state.progress.step, seen.run_state_error) == (3, None)

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(), test)


def test_silence_counts_from_the_first_failed_poll_of_this_cluster() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        watched.ray.failing = {"nodes"}
        silent = []
        for seconds in (0.0, 7.0, 13.0):
            watched.now += seconds
            silent.append((await watched.look()).silent_seconds)
        assert silent == [0.0, 7.0, 20.0]
        other = await watched.watcher.observe("uid", watched.dashboard("of another cluster"), None)
        assert (other.reachability, other.silent_seconds) == (Reachability.UNREACHABLE, 0.0)
        watched.now += 5
        watched.ray.failing = set()
        assert (await watched.look()).silent_seconds == 0.0
        watched.now += 5
        watched.ray.failing = {"nodes", "state"}
        assert (await watched.look()).silent_seconds == 0.0
        watched.now += 2
        watched.watcher.forget("uid")
        assert (await watched.look()).silent_seconds == 0.0

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(state=watched_dashboard.state("Running")), test)


def test_a_slow_poll_counts_as_silence_for_its_duration() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        ticks = iter((1000.0, 1004.0))
        watcher = RunWatcher(lambda: next(ticks))
        seen = await watcher.observe("uid", watched.dashboard(), None)
        assert (seen.reachability, seen.silent_seconds) == (Reachability.UNREACHABLE, 4.0)

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(failing={"nodes"}), test)


def test_a_dashboard_without_authentication_is_reported_and_gets_no_token() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        seen = await watched.look(None)
        assert seen.reachability is Reachability.OPEN
        assert "without a token" in (seen.error or "")
        with pytest.raises(DashboardOpenError):
            await watched.dashboard().submit({"submission_id": watched_dashboard.SUBMISSION})
        assert watched.ray.since() == ["probe", "probe"]
        watched.now += 9
        assert (await watched.look(None)).silent_seconds == 9.0
        watched.ray.guarded = True
        assert (await watched.look(None)).reachability is Reachability.OK
        await watched.dashboard().submit({"submission_id": watched_dashboard.SUBMISSION})
        assert watched.ray.since() == ["probe", "probe", "nodes", "probe", "submit"]

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(guarded=False), test)


def test_a_rejected_token_proves_nothing_for_other_tokens() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        watched.ray.rejecting = True
        assert (await watched.look(None)).reachability is Reachability.REJECTED
        # A rejection comes twice: the second time on a connection that ends with it.
        assert watched.ray.since() == ["probe", "nodes", "nodes"]
        watched.ray.rejecting, watched.ray.guarded = False, False
        assert (await watched.look(None)).reachability is Reachability.OPEN
        assert watched.ray.since() == ["probe"]

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(), test)


def test_an_unclear_response_to_the_probe_proves_nothing() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        seen = await watched.look(None)
        assert (seen.reachability, watched.ray.since()) == (Reachability.UNREACHABLE, ["probe"])
        assert "HTTP 503" in (seen.error or "")
        watched.ray.failing = set()
        assert (await watched.look(None)).reachability is Reachability.OK

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(failing={"probe"}), test)


def test_a_new_watcher_sees_the_same_as_the_third_poll() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        moments = [
            ("PENDING", None),
            ("RUNNING", None),
            ("RUNNING", watched_dashboard.state("Starting", 0)),
            *(("RUNNING", watched_dashboard.state("Running", step)) for step in (0, 1, 2)),
            ("RUNNING", "damaged"),
            ("RUNNING", watched_dashboard.state("Running", 3)),
            ("RUNNING", watched_dashboard.state("Stopping", 3)),
            ("RUNNING", watched_dashboard.state("Stopped", 3)),
            ("STOPPED", watched_dashboard.state("Stopped", 3)),
            (None, None),
            ("RUNNING", watched_dashboard.state("Running", 3)),
            ("FAILED", watched_dashboard.state("Running", 3)),
        ]
        for watched.ray.status, watched.ray.state in moments:
            watched.now += 30
            # Nodes, run state and process take one poll each if all are due.
            await watched.look()
            await watched.look()
            remembering = await watched.look()
            forgetful = await RunWatcher(lambda: watched.now).observe(
                "uid", watched.dashboard(), watched_dashboard.SUBMISSION
            )
            assert remembering == forgetful

    watched_dashboard.run_with_dashboard(
        watched_dashboard.FakeRay(groups=[watched_dashboard.INFEASIBLE], log="last words"), test
    )


def test_a_missing_stack_writer_costs_one_request_while_it_matters() -> None:
    async def test(watched: watched_dashboard.WatchedDashboard) -> None:
        assert not (await watched.look()).stacks_missing
        watched.ray.since()
        seen = await watched.watcher.observe(
            "uid", watched.dashboard(), watched_dashboard.SUBMISSION, watched_dashboard.STACKS
        )
        assert (watched.ray.since(), seen.stacks_missing) == (["state", "stacks"], True)
        watched.ray.has_stacks = True
        seen = await watched.watcher.observe(
            "uid", watched.dashboard(), watched_dashboard.SUBMISSION, watched_dashboard.STACKS
        )
        assert (watched.ray.since(), seen.stacks_missing) == (["job", "stacks"], False)
        watched.ray.failing.add("stacks")
        seen = await watched.watcher.observe(
            "uid", watched.dashboard(), watched_dashboard.SUBMISSION, watched_dashboard.STACKS
        )
        # The rest is still known if this is not.
        assert (seen.reachability, seen.stacks_missing) == (Reachability.OK, False)
        assert seen.job is not None

    watched_dashboard.run_with_dashboard(watched_dashboard.FakeRay(state=watched_dashboard.state("Running")), test)
