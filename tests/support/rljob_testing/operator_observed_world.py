"""A small model of the outside: KubeRay, pods and Ray as they react to the operator's effects, in a time of their own.

With it the operator's decisions run from a job's creation to its end in a plain loop; what the operator knows between
passes is the status alone, so that it may crash anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

from rljob_api.conditions import Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.run_state import RunPhase, RunState
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import CheckpointStatus, RLJobStatus
from rljob_operator.reconcile.observed import (
    EffectFailure,
    EffectKind,
    Observed,
    ObservedCluster,
    ObservedPod,
    ObservedRay,
    ObservedRayJob,
    PodProblem,
    RayJobStatus,
    Reachability,
)
from rljob_operator.reconcile.plan_types import CreateCluster, DeleteCluster, Effect, Plan, StopJob, SubmitJob
from rljob_operator.reconcile.reconcile import reconcile
from rljob_operator.reconcile.timestamps import timestamp
from rljob_testing.operator_jobs import DEFAULTS, spec
from rljob_testing.operator_observed import CLUSTER_UID, NOW, SUBMISSION, cluster, job, pod, ray, run_state

TICK_SECONDS = 4
POD_TICKS = 3
"""From a cluster to ready pods, and from its deletion to none."""
STEPS = 10


class OperatorCrash(Exception):
    """The operator's process ends here."""


@dataclass
class Scenario:
    """What is special about the outside."""

    job_spec: RLJobSpec = field(default_factory=spec)
    exit_code: int = 0
    """Of the trainer, after its last step."""
    fails_at_step: int | None = None
    pods_get_ready: bool = True
    head_lost_at_step: int | None = None
    cluster_deleted_at_step: int | None = None
    refused_creations: int = 0
    failed_submissions: int = 0
    """Requests that do nothing and fail."""
    lost_answers: bool = False
    """The first request of each kind is carried out, and reported as failed."""
    silent_ticks: range = range(0)
    """Of the dashboard."""


@dataclass
class World:
    """The outside of one job."""

    scenario: Scenario
    tick: int = 0
    cluster_since: int | None = None
    deleted_since: int | None = None
    head_lost: bool = False
    job_since: int | None = None
    stop_since: int | None = None
    num_clusters: int = 0
    num_jobs: int = 0
    reported_lost: set[EffectKind] = field(default_factory=set)

    def observe(self, status: RLJobStatus, failure: EffectFailure | None) -> Observed:
        """As the operator sees it now."""
        self._advance()
        there = self._cluster()
        has_head = there is not None and any(each.group == HEAD_GROUP and each.ready for each in self._pods())
        silent = self.tick in self.scenario.silent_ticks
        seen = ObservedRay(Reachability.UNREACHABLE, error="timeout") if silent else self._ray()
        return Observed(
            job=job(self.scenario.job_spec, status),
            kuberay_installed=True,
            cluster=there,
            pods=self._pods(),
            ray=seen if has_head else ObservedRay(Reachability.NOT_ASKED),
            failure=failure,
        )

    def carry_out(self, effect: Effect) -> EffectFailure | None:
        """What became of an effect."""
        if isinstance(effect, CreateCluster):
            return self._create()
        if isinstance(effect, SubmitJob):
            return self._submit(effect)
        if isinstance(effect, StopJob):
            self.stop_since = self.tick if self.stop_since is None else self.stop_since
            return None
        assert isinstance(effect, DeleteCluster)
        assert effect.uid == CLUSTER_UID
        self.deleted_since = self.tick if self.deleted_since is None else self.deleted_since
        return None

    def _advance(self) -> None:
        self.tick += 1
        if self.deleted_since is not None and self.tick >= self.deleted_since + POD_TICKS:
            self.cluster_since = None
        scenario, step = self.scenario, self._step()
        if scenario.head_lost_at_step is not None and step >= scenario.head_lost_at_step:
            self.head_lost = True
        lost = scenario.cluster_deleted_at_step
        if lost is not None and step >= lost and self.deleted_since is None:
            self.deleted_since = self.tick

    def _create(self) -> EffectFailure | None:
        if self.scenario.refused_creations > 0:
            self.scenario.refused_creations -= 1
            return EffectFailure(EffectKind.CREATE_CLUSTER, Reason.CREATION_REFUSED, "over quota")
        if self.cluster_since is None:
            self.num_clusters += 1
            self.cluster_since = self.tick
        return self._lost_answer(EffectKind.CREATE_CLUSTER, Reason.CREATION_REFUSED)

    def _submit(self, effect: SubmitJob) -> EffectFailure | None:
        assert effect.submission_id == SUBMISSION
        if self.scenario.failed_submissions > 0:
            self.scenario.failed_submissions -= 1
            return EffectFailure(EffectKind.SUBMIT_JOB, Reason.SUBMISSION_FAILED, "no agent")
        if self.job_since is None:
            self.num_jobs += 1
            self.job_since = self.tick
        return self._lost_answer(EffectKind.SUBMIT_JOB, Reason.DASHBOARD_UNREACHABLE)

    def _lost_answer(self, kind: EffectKind, reason: Reason) -> EffectFailure | None:
        if not self.scenario.lost_answers or kind in self.reported_lost:
            return None
        self.reported_lost.add(kind)
        return EffectFailure(kind, reason, "timeout")

    def _cluster(self) -> ObservedCluster | None:
        return None if self.cluster_since is None else cluster(deleting=self.deleted_since is not None)

    def _pods(self) -> tuple[ObservedPod, ...]:
        if self.cluster_since is None:
            return ()
        going = self.deleted_since is not None
        ready = self.tick >= self.cluster_since + POD_TICKS and self.scenario.pods_get_ready
        problem = None if ready else PodProblem(Reason.UNSCHEDULABLE, "no node has a GPU")
        workers = (pod("w", ready=ready, deleting=going, problem=problem),)
        return workers if self.head_lost else (pod("h", HEAD_GROUP, ready=ready, deleting=going), *workers)

    def _step(self) -> int:
        return 0 if self.job_since is None else min(STEPS, self.tick - self.job_since)

    def _ray(self) -> ObservedRay:
        if self.job_since is None:
            return ray()
        scenario, step = self.scenario, self._step()
        failed = scenario.fails_at_step is not None and step >= scenario.fails_at_step
        if self.stop_since is not None and self.tick >= self.stop_since + 2:
            return ray(
                ObservedRayJob(SUBMISSION, RayJobStatus.STOPPED, "stopped", None, None), self._state(RunPhase.STOPPED)
            )
        if failed or (step == STEPS and scenario.exit_code):
            ended = ObservedRayJob(SUBMISSION, RayJobStatus.FAILED, "failed", None, scenario.exit_code or 1)
            return ray(ended, self._state(RunPhase.FAILED))
        if step == STEPS:
            done = ObservedRayJob(SUBMISSION, RayJobStatus.SUCCEEDED, "done", None, 0)
            return ray(done, self._state(RunPhase.COMPLETE))
        phase = RunPhase.STARTING if step < 2 else RunPhase.RUNNING
        return ray(ObservedRayJob(SUBMISSION, RayJobStatus.RUNNING, "", None, None), self._state(phase))

    def _state(self, phase: RunPhase) -> RunState:
        scenario, step = self.scenario, self._step()
        if scenario.fails_at_step is not None:
            step = min(step, scenario.fails_at_step)
        if phase is RunPhase.STOPPED:
            step = 5
        since = self.job_since or 0
        written, saved = (NOW + timedelta(seconds=TICK_SECONDS * tick) for tick in (self.tick, since + 5))
        state = run_state(phase, step=step, seconds_ago=(NOW - written).total_seconds())
        if step < 5:
            return state
        checkpoint = CheckpointStatus(
            step=5, uri="file:///rljob/storage/checkpoints/5", digest="sha256:1", saved_at=timestamp(saved)
        )
        return state.model_copy(update={"checkpoint": checkpoint})


@dataclass
class Operator:
    """The loop around `reconcile`. It crashes at the points of `crashes`, which are counted over the whole run."""

    world: World
    crashes: frozenset[int] = frozenset()
    status: RLJobStatus = field(default_factory=RLJobStatus)
    """What is stored on the API server."""
    num_points: int = 0
    num_writes: int = 0

    def run(self, num_passes: int = 700) -> None:
        """Passes until nothing is left to do; raises AssertionError if that does not come."""
        failure: EffectFailure | None = None
        for _ in range(num_passes):
            try:
                plan, failure = self._pass(failure)
            except OperatorCrash:
                failure = None
                continue
            if plan.requeue_after_seconds is None and not plan.effects and self.world.cluster_since is None:
                return
        raise AssertionError(f"not at an end after {num_passes} passes: {self.status!r}")

    def _pass(self, failure: EffectFailure | None) -> tuple[Plan, EffectFailure | None]:
        seen = self.world.observe(self.status, failure)
        now = NOW + timedelta(seconds=TICK_SECONDS * self.world.tick)
        plan = reconcile(seen, now, DEFAULTS)
        self._may_crash()
        if plan.status != self.status:
            self.num_writes += 1
            self.status = RLJobStatus.from_wire(plan.status.to_wire())
        self._may_crash()
        failure = None
        for effect in plan.effects:
            failure = self.world.carry_out(effect)
            self._may_crash()
            if failure is not None:
                break
        return plan, failure

    def _may_crash(self) -> None:
        self.num_points += 1
        if self.num_points in self.crashes:
            raise OperatorCrash


def ran(scenario: Scenario, crashes: frozenset[int] = frozenset()) -> Operator:
    """The operator after the whole life of a job in this world."""
    operator = Operator(World(replace(scenario)), crashes)
    operator.run()
    return operator
