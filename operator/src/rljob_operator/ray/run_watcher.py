"""Polls the trainers of running RLJobs with as few requests as possible.

A full poll requests the nodes of the Ray cluster, the Ray job and the trainer's run state; while the trainer starts,
also the placement groups; if the Ray job has ended without success, also the driver's log. After the start of the
trainer, one request for each poll is enough: the run state, or the Ray job if the previous poll found the run state
unchanged. Once a minute the nodes are requested, too. Everything else comes from memory, so the result is always
complete. Without memory, as after a restart of the operator, the next poll is a full one.

A dashboard that has failed for a while is polled less and less often, so that it costs little, whatever it sends. In
between, its newest failure counts as observed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from rljob_api.constants import driver_log_file_name, run_state_file_name
from rljob_api.run_state import RunPhase
from rljob_operator.raw_json import JsonObject, text_at
from rljob_operator.ray.client import (
    Dashboard,
    DashboardOpenError,
    DashboardUnreachableError,
    LargeResponseError,
    TokenRejectedError,
)
from rljob_operator.ray.dashboard_responses import (
    MAX_LOG_CHARACTERS,
    NO_RUN_STATE,
    RunStateFile,
    has_failed,
    head_id,
    infeasible_groups,
    observed_ray_job,
    observed_ray_node,
    run_state_file,
    too_long_run_state,
)
from rljob_operator.reconcile.observed import ObservedRay, ObservedRayJob, ObservedRayNode, Reachability

POLL_TIMEOUT_SECONDS = 10.0
"""Timeout for all requests of one poll together, without the check for the stack-trace program."""
GROUPS_SECONDS = 30.0
"""Minimum time between two requests for placement groups while a trainer starts."""
LONGEST_SILENCE_SECONDS = 60.0
"""Longest time between two polls of a dashboard that fails. If its polls have failed for t seconds, the next one is t/2
seconds later: a dashboard that just starts is polled often."""
NODES_SECONDS = 60.0
"""Minimum time between two requests for the nodes, once Ray has the trainer."""
NUM_LOG_LINES = 50
"""How many of the last lines of the driver's log are requested."""
LONG_AGO = float("-inf")
PHASES_AFTER_START = (RunPhase.RUNNING, RunPhase.STOPPING)
"""The phases after Starting and before the final phases."""


@dataclass
class _Nodes:
    """The Ray nodes in the last response, and when they were requested (seconds of the watcher's clock)."""

    alive: tuple[ObservedRayNode, ...] = ()
    head_id: str = ""
    requested_at: float = LONG_AGO
    num_pods: int = 0
    """Number of running pods of the cluster."""


@dataclass
class _Run:
    """The newest submission as last observed."""

    submission_id: str
    ray_job: ObservedRayJob
    driver_node_id: str
    """Id of the Ray node on which the driver runs; empty if Ray reports none."""
    file: RunStateFile = NO_RUN_STATE
    """The run state file in the last response."""
    infeasible_groups: tuple[str, ...] = ()
    groups_requested_at: float = LONG_AGO
    ray_job_is_next: bool = False
    """Whether the next poll requests the Ray job instead of the run state."""

    @property
    def is_one_request_enough(self) -> bool:
        """Whether one request for each poll is enough: the trainer has reported a phase after Starting and no final
        one. Also true if the run state cannot be parsed: its content still shows whether it changes."""
        if self.file.error is not None:
            return True
        return self.file.state is not None and self.file.state.phase in PHASES_AFTER_START

    @property
    def is_starting(self) -> bool:
        """Whether the Ray job has not ended and the trainer has reported no phase after Starting. A trainer whose run
        state cannot be parsed counts as started."""
        state = self.file.state
        has_started = self.file.error is not None or (state is not None and state.phase is not RunPhase.STARTING)
        return not self.ray_job.status.has_ended and not has_started


@dataclass
class _Memory:
    """What is remembered of one RLJob: its current cluster and its newest submission."""

    cluster: tuple[str, ...]
    """See `Dashboard.cluster`."""
    nodes: _Nodes
    requires_token: bool = False
    """Whether the dashboard has rejected a request without a token."""
    run: _Run | None = None
    """None makes the next poll a full one."""
    failing_since: float | None = None
    """When the first of the failed polls since the last success began; None if the last poll succeeded."""
    failure: ObservedRay | None = None
    """The result of the last poll if it failed."""
    waits_until: float = LONG_AGO
    """Until then, a failing dashboard is not polled."""


class RunWatcher:
    """Polls the dashboards of all RLJobs of one process. `clock`: returns monotonic seconds, such as
    `time.monotonic`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._memories: dict[str, _Memory] = {}

    async def observe(
        self,
        job: str,
        dashboard: Dashboard,
        submission_id: str | None,
        stacks_id: str | None = None,
        *,
        num_pods: int,
        at_once: bool = False,
    ) -> ObservedRay:
        """Polls the cluster of an RLJob and its newest submission. Never raises: errors are in the result. Calls for
        the same RLJob must not overlap.

        Args:
            job: A string that identifies the RLJob.
            submission_id: The newest submission; None if there is none.
            stacks_id: Submission id of the program that writes the trainer's stack traces. If it is not None, a
                successful poll also checks whether Ray has this program.
            num_pods: The number of running pods of the cluster, which limits the size of Ray's responses.
            at_once: Poll the dashboard even if `is_waiting`.
        """
        memory = self._memories.get(job)
        if memory is None or memory.cluster != dashboard.cluster:
            memory = self._memories[job] = _Memory(dashboard.cluster, _Nodes())
        begun_at = self._clock()
        failure, failing_since = memory.failure, memory.failing_since
        if failure is not None and failing_since is not None and begun_at < memory.waits_until and not at_once:
            return replace(failure, silent_seconds=begun_at - failing_since)
        memory.nodes.num_pods = num_pods
        seen = await self._poll(memory, dashboard, submission_id)
        if seen.reachability is Reachability.OK:
            memory.failing_since, memory.failure = None, None
            return seen if stacks_id is None else replace(seen, stacks_missing=await _is_missing(dashboard, stacks_id))
        memory.run = None
        if seen.reachability is Reachability.REJECTED:
            # The check without a token may have reached the pod of an earlier cluster of this name: repeat it.
            memory.requires_token = False
        if memory.failing_since is None:
            memory.failing_since = begun_at
        now = self._clock()
        silent_seconds = now - memory.failing_since
        memory.failure = seen
        memory.waits_until = now + min(LONGEST_SILENCE_SECONDS, silent_seconds / 2)
        return replace(seen, silent_seconds=silent_seconds)

    def is_waiting(self, job: str) -> bool:
        """Whether the dashboard of an RLJob has failed for a while, so that `observe` does not poll it now."""
        memory = self._memories.get(job)
        return memory is not None and memory.failure is not None and self._clock() < memory.waits_until

    def poll_soon(self, job: str) -> None:
        """Ends `is_waiting`, because something about the head pod has changed: it may be another one, whose silence is
        counted from now on."""
        if memory := self._memories.get(job):
            memory.waits_until, memory.failing_since, memory.failure = LONG_AGO, None, None

    def forget(self, job: str) -> None:
        """Forgets an RLJob; does nothing if it was not watched."""
        self._memories.pop(job, None)

    async def _poll(self, memory: _Memory, dashboard: Dashboard, submission_id: str | None) -> ObservedRay:
        try:
            async with asyncio.timeout(POLL_TIMEOUT_SECONDS):
                return await self._poll_or_raise(memory, dashboard, submission_id)
        except TimeoutError:
            return ObservedRay(Reachability.UNREACHABLE, error=f"poll timed out after {POLL_TIMEOUT_SECONDS:g} s")
        except DashboardUnreachableError as error:
            return ObservedRay(Reachability.UNREACHABLE, error=str(error))
        except TokenRejectedError as error:
            return ObservedRay(Reachability.REJECTED, error=str(error))
        except DashboardOpenError as error:
            return ObservedRay(Reachability.OPEN, error=str(error))
        except (ValueError, OverflowError, RecursionError) as error:
            return ObservedRay(Reachability.UNREACHABLE, error=f"the response cannot be parsed: {error}")

    async def _poll_or_raise(self, memory: _Memory, dashboard: Dashboard, submission_id: str | None) -> ObservedRay:
        if not memory.requires_token:
            await dashboard.check_token_is_required()
            memory.requires_token = True
        run = memory.run
        if run is not None and run.submission_id == submission_id:
            try:
                seen = await self._short_poll(memory.nodes, run, dashboard)
            except DashboardUnreachableError:
                seen = None
            if seen is not None:
                memory.run = run if not run.ray_job.status.has_ended else None
                return seen
        return await self._full_poll(memory, dashboard, submission_id)

    async def _full_poll(self, memory: _Memory, dashboard: Dashboard, submission_id: str | None) -> ObservedRay:
        memory.run = None
        await self._request_nodes(memory.nodes, dashboard)
        found = await dashboard.job(submission_id) if submission_id is not None else None
        if found is None or submission_id is None:
            return ObservedRay(Reachability.OK, nodes=memory.nodes.alive)
        driver_node_id = text_at(found, "driver_node_id") or memory.nodes.head_id
        run = _Run(submission_id, observed_ray_job(submission_id, found), driver_node_id)
        seen = await self._request_rest(memory.nodes, run, dashboard)
        memory.run = run if not run.ray_job.status.has_ended else None
        return seen

    async def _short_poll(self, nodes: _Nodes, run: _Run, dashboard: Dashboard) -> ObservedRay | None:
        """A poll with as few requests as possible; None if Ray does not know the submission, so that a full poll is
        needed."""
        if self._clock() - nodes.requested_at >= NODES_SECONDS:
            await self._request_nodes(nodes, dashboard)
        if run.is_one_request_enough and not run.ray_job_is_next:
            former = run.file
            await _read_run_state(run, dashboard)
            run.ray_job_is_next = run.file == former
            if run.is_one_request_enough:
                return _result(nodes, run)
        found = await dashboard.job(run.submission_id)
        if found is None:
            return None
        _update_ray_job(run, found)
        if run.is_one_request_enough and not run.ray_job.status.has_ended:
            return _result(nodes, run)
        return await self._request_rest(nodes, run, dashboard)

    async def _request_rest(self, nodes: _Nodes, run: _Run, dashboard: Dashboard) -> ObservedRay:
        """Requests the run state and, where needed, the placement groups and the log. The caller must have requested
        the Ray job before: if the Ray job has ended, the run state is then the final one."""
        await _read_run_state(run, dashboard)
        if run.is_starting and self._clock() - run.groups_requested_at >= GROUPS_SECONDS:
            run.infeasible_groups = infeasible_groups(await dashboard.pending_groups(nodes.num_pods))
            run.groups_requested_at = self._clock()
        failed = has_failed(run.ray_job, run.file.state)
        return replace(_result(nodes, run), log_tail=await _log_tail(run, dashboard) if failed else "")

    async def _request_nodes(self, nodes: _Nodes, dashboard: Dashboard) -> None:
        found = await dashboard.nodes(nodes.num_pods)
        nodes.alive = tuple(observed_ray_node(node) for node in found)
        nodes.head_id = head_id(found)
        nodes.requested_at = self._clock()


def _result(nodes: _Nodes, run: _Run) -> ObservedRay:
    return ObservedRay(
        Reachability.OK,
        nodes=nodes.alive,
        job=run.ray_job,
        run_state=run.file.state,
        run_state_error=run.file.error,
        infeasible_groups=run.infeasible_groups if run.is_starting else (),
    )


def _update_ray_job(run: _Run, found: JsonObject) -> None:
    run.ray_job = observed_ray_job(run.submission_id, found)
    run.driver_node_id = text_at(found, "driver_node_id") or run.driver_node_id
    run.ray_job_is_next = False


async def _is_missing(dashboard: Dashboard, submission_id: str) -> bool:
    """Whether Ray reports that it does not know the submission. False if the request fails, so that the failure does
    not delay the stop of a trainer."""
    try:
        return await dashboard.job(submission_id) is None
    except (DashboardUnreachableError, TokenRejectedError, ValueError, RecursionError):
        return False


async def _read_run_state(run: _Run, dashboard: Dashboard) -> None:
    if not run.driver_node_id:
        run.file = NO_RUN_STATE
        return
    try:
        text = await dashboard.run_state_file(run.driver_node_id, run_state_file_name(run.submission_id))
    except LargeResponseError as error:
        run.file = too_long_run_state(str(error), b"")
    else:
        run.file = run_state_file(text, run.file)


async def _log_tail(run: _Run, dashboard: Dashboard) -> str:
    if not run.driver_node_id:
        return ""
    try:
        text = await dashboard.log_end(run.driver_node_id, driver_log_file_name(run.submission_id), NUM_LOG_LINES)
    except LargeResponseError as error:
        return f"the end of the driver's log cannot be shown: {error}"
    return (text or "")[-MAX_LOG_CHARACTERS:]
