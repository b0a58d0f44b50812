"""A small model of what the operator controls: KubeRay, pods, Ray and the job's storage, with a simulated time.

With it the operator's decisions run in a plain loop from the creation of a job to its end. Between passes only the
status is kept, so the operator may crash anywhere, or pause and continue after another replica became the leader.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

from rljob_api.conditions import Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.run_state import RunPhase, RunState
from rljob_api.v1alpha1.status import CheckpointStatus, RLJobStatus
from rljob_operator.reconcile.decision import (
    ApplyNetworkPolicy,
    CreateCluster,
    DeleteCluster,
    DeleteJob,
    DumpStacks,
    Effect,
    StopRayJob,
    SubmitRayJob,
)
from rljob_operator.reconcile.observed import (
    EffectFailure,
    EffectKind,
    Observed,
    ObservedPod,
    ObservedRay,
    ObservedRayJob,
    PodProblem,
    RayJobStatus,
    Reachability,
)
from rljob_operator.reconcile.status_draft import timestamp
from rljob_testing.operator import inputs
from rljob_testing.operator.scenarios import STEPS, Scenario, Start

TICK_SECONDS = 4
POD_TICKS = 3
"""Ticks from the creation of a cluster to ready pods, and from its deletion to the removal of its pods."""
STEPS_BETWEEN_CHECKPOINTS = 5
LOADING_TICKS = 2


@dataclass
class Trainer:
    """A job in Ray."""

    submission_id: str
    start_number: int
    script: Start
    since: int
    from_step: int
    stop_since: int | None = None
    saved_step: int | None = None

    def step(self, tick: int) -> int:
        """The step that the trainer has reached."""
        return min(self.from_step + max(0, tick - self.since - LOADING_TICKS), self.script.last_step)


@dataclass
class Cluster:
    """A RayCluster with its pods and Ray jobs."""

    name: str
    uid: str
    since: int
    deleted_since: int | None = None
    trainers: dict[str, Trainer] = field(default_factory=dict)
    head_lost: bool = False
    node_lost_since: int | None = None
    emptied_at: int | None = None
    """Tick at which the pods of a suspended cluster will be gone; None if it has none, or is not suspended."""
    is_empty: bool = False
    """Whether the cluster has no pods, because it is suspended."""
    was_complete: bool = False
    """Whether all pods were ready once; a suspension resets it."""

    @property
    def newest(self) -> Trainer | None:
        """The trainer that was submitted last."""
        return list(self.trainers.values())[-1] if self.trainers else None


@dataclass
class World:
    """Everything outside the operator that belongs to one job."""

    scenario: Scenario
    tick: int = 0
    clusters: dict[str, Cluster] = field(default_factory=dict)
    """Existing clusters by UID."""
    lost_pods: list[ObservedPod] = field(default_factory=list)
    """Pods on lost nodes whose cluster was deleted."""
    num_clusters: int = 0
    starts: list[int] = field(default_factory=list)
    """Start numbers of all submissions, in order."""
    nodes_of_starts: list[int] = field(default_factory=list)
    """Number of nodes of each submission."""
    nodes_away: int = 0
    saved_step: int = 0
    """Step of the newest checkpoint in the job's storage."""
    savers: list[int] = field(default_factory=list)
    """Start numbers that saved checkpoints, in order."""
    most_running: int = 0
    """Maximum number of trainers that ran at the same time, without those on lost nodes."""
    reported_lost: set[EffectKind] = field(default_factory=set)
    deleted: bool = False
    stop_asked: int | None = None
    retry_asked: int | None = None

    @property
    def has_later_request(self) -> bool:
        """Whether a user will still change the job."""
        scenario = self.scenario
        return self.tick < scenario.suspended_ticks.stop or (scenario.is_retried and self.retry_asked is None)

    def hear(self, status: RLJobStatus) -> None:
        """Lets users react to the status."""
        state = status.attempts[0].state if status.attempts else None
        if self.stop_asked is None and state is not None and state == self.scenario.stopped_in:
            self.stop_asked = self.tick
        if self.retry_asked is None and self.scenario.is_retried and status.result is not None:
            self.retry_asked = self.tick

    def advance(self) -> None:
        """Simulates one tick."""
        self.tick += 1
        for found in list(self.clusters.values()):
            self._happen(found)
            self._suspend(found)
            pods = self._pods_of(found)
            found.was_complete |= len(pods) == 1 + self._num_nodes and all(pod.ready for pod in pods)
            if found.deleted_since is not None and self.tick >= found.deleted_since + POD_TICKS:
                del self.clusters[found.uid]
                if found.node_lost_since is not None:
                    self.lost_pods += [each for each in self._pods_of(found) if each.group == HEAD_GROUP]
        self.most_running = max(self.most_running, sum(map(self._num_running, self.clusters.values())))

    def observe(self, name: str, failure: EffectFailure | None) -> Observed:
        """What the operator observes now. `name`: the cluster whose dashboard it polls."""
        suspend = self.tick in self.scenario.suspended_ticks
        wanted = self.scenario.job_spec.model_copy(update={"suspend": suspend})
        stop, retry = _asked_at(self.stop_asked), _asked_at(self.retry_asked)
        return Observed(
            job=replace(inputs.job(wanted), stop_request=stop, retry_request=retry),
            kuberay_installed=True,
            clusters=tuple(
                inputs.cluster(
                    uid=found.uid,
                    name=found.name,
                    deleting=found.deleted_since is not None,
                    provisioned=found.was_complete,
                    suspended=self._has_no_quota,
                    suspending=self._is_suspending(found),
                    queue="team" if self.scenario.ticks_without_quota else "",
                )
                for found in self.clusters.values()
            ),
            pods=(*(each for found in self.clusters.values() for each in self._pods_of(found)), *self.lost_pods),
            ray=self._dashboard(name),
            failure=failure,
        )

    def execute(self, effect: Effect, name: str) -> EffectFailure | None:
        """Applies an effect and returns how it failed. `name`: the attempt's cluster as far as the operator knew."""
        match effect:
            case CreateCluster():
                return self._create(effect)
            case SubmitRayJob():
                return self._submit(effect, name)
            case StopRayJob():
                self._stop(effect, name)
            case DeleteCluster():
                found = self.clusters.get(effect.uid)
                if found is not None and found.deleted_since is None:
                    found.deleted_since = self.tick
            case DeleteJob():
                self.deleted = True
            case ApplyNetworkPolicy() | DumpStacks():
                pass
        return None

    def _named(self, name: str) -> Cluster | None:
        return next((found for found in self.clusters.values() if found.name == name), None)

    def _happen(self, found: Cluster) -> None:
        """Applies the scenario to a cluster, and its trainer's checkpoint to the storage."""
        trainer = found.newest
        if trainer is None:
            return
        script, step = trainer.script, trainer.step(self.tick)
        if script.head_lost_at_step is not None and step >= script.head_lost_at_step:
            found.head_lost = True
        if script.node_lost_at_step is not None and step >= script.node_lost_at_step and found.node_lost_since is None:
            found.node_lost_since = self.tick
        if script.worker_lost_at_step is not None and step >= script.worker_lost_at_step:
            self.nodes_away = 1
        if script.waits_at_step is not None and step >= script.waits_at_step:
            self.nodes_away = 0
        lost = script.cluster_deleted_at_step
        if lost is not None and step >= lost and found.deleted_since is None:
            found.deleted_since = self.tick
        is_there = _is_reached(found)
        saves = step % STEPS_BETWEEN_CHECKPOINTS == 0 or (self._runs(found) and trainer.stop_since == self.tick - 1)
        if is_there and saves:
            self._save(trainer, step)

    @property
    def _has_no_quota(self) -> bool:
        return any(self.tick in ticks for ticks in self.scenario.ticks_without_quota)

    def _is_suspending(self, found: Cluster) -> bool:
        """Whether KubeRay still deletes the pods of a suspended cluster, also if it is admitted again meanwhile."""
        return found.emptied_at is not None and self.tick < found.emptied_at

    def _suspend(self, found: Cluster) -> None:
        """KubeRay deletes the pods of a suspended cluster, and starts new ones once it is admitted again."""
        if self._is_suspending(found):
            return
        if found.emptied_at is not None:
            found.trainers, found.emptied_at, found.is_empty, found.was_complete = {}, None, True, False
        elif self._has_no_quota and not found.is_empty:
            found.emptied_at = self.tick + POD_TICKS
            if found.newest is not None and found.newest.stop_since is None:
                # The head pod's preStop hook.
                found.newest.stop_since = self.tick
        elif not self._has_no_quota and found.is_empty:
            found.is_empty, found.since = False, self.tick

    def _save(self, trainer: Trainer, step: int) -> None:
        """Saves a checkpoint. Fencing: only the newest start can save."""
        if step > self.saved_step and trainer.start_number == max(self.starts):
            self.saved_step = trainer.saved_step = step
            self.savers.append(trainer.start_number)

    def _runs(self, found: Cluster) -> bool:
        """Whether the newest trainer of the cluster runs."""
        return found.newest is not None and _is_reached(found) and self._is_running(found.newest)

    def _num_running(self, found: Cluster) -> int:
        """Number of running trainers; those of a cluster that is being deleted count."""
        return sum(map(self._is_running, found.trainers.values())) if _is_reached(found) else 0

    def _is_running(self, trainer: Trainer) -> bool:
        return self._status(trainer) is RayJobStatus.RUNNING

    def _create(self, effect: CreateCluster) -> EffectFailure | None:
        if self.scenario.refused_creations > 0:
            self.scenario.refused_creations -= 1
            return EffectFailure(EffectKind.CREATE_CLUSTER, Reason.CREATION_REJECTED, "forbidden")
        if self._named(effect.cluster) is None:
            self.num_clusters += 1
            uid = f"c{self.num_clusters}"
            self.clusters[uid] = Cluster(effect.cluster, uid, self.tick, is_empty=self._has_no_quota)
        return self._lost_answer(EffectKind.CREATE_CLUSTER, Reason.CREATION_REJECTED)

    def _submit(self, effect: SubmitRayJob, name: str) -> EffectFailure | None:
        found = self._named(name)
        if self.scenario.failed_submissions > 0 or found is None:
            self.scenario.failed_submissions -= 1
            return EffectFailure(EffectKind.SUBMIT_JOB, Reason.SUBMISSION_FAILED, "no agent")
        if effect.submission_id not in found.trainers:
            number = len(self.starts)
            script = self.scenario.starts[number] if number < len(self.scenario.starts) else Start()
            self.starts.append(effect.start_number)
            self.nodes_of_starts.append(dict(effect.nodes).get("main", self._num_nodes))
            found.trainers[effect.submission_id] = Trainer(
                effect.submission_id, effect.start_number, script, self.tick, self.saved_step
            )
        return self._lost_answer(EffectKind.SUBMIT_JOB, Reason.DASHBOARD_UNREACHABLE)

    def _stop(self, effect: StopRayJob, name: str) -> None:
        found = self._named(name)
        trainer = found.trainers.get(effect.submission_id) if found is not None else None
        if trainer is not None and trainer.stop_since is None:
            trainer.stop_since = self.tick

    def _lost_answer(self, kind: EffectKind, reason: Reason) -> EffectFailure | None:
        if not self.scenario.lost_answers or kind in self.reported_lost:
            return None
        self.reported_lost.add(kind)
        return EffectFailure(kind, reason, "timeout")

    @property
    def _num_nodes(self) -> int:
        return self.scenario.job_spec.pools[0].nodes

    @property
    def _gpus(self) -> tuple[int, ...]:
        return (2,) * (self._num_nodes - self.nodes_away)

    def _pods_of(self, found: Cluster) -> tuple[ObservedPod, ...]:
        if found.is_empty:
            return ()
        going = found.deleted_since is not None or found.emptied_at is not None
        ready = self.tick >= found.since + POD_TICKS and self.tick not in self.scenario.ticks_without_room
        problem = None if ready else PodProblem(Reason.UNSCHEDULABLE, "no node has a GPU")
        lost = found.node_lost_since
        silent = 0.0 if lost is None else float(TICK_SECONDS * (self.tick - lost))
        workers = [
            inputs.pod(f"{found.uid}-w{number}", cluster=found.name, ready=ready, deleting=going, problem=problem)
            for number in range(self._num_nodes - self.nodes_away)
        ]
        if found.head_lost:
            return tuple(workers)
        head = inputs.pod(
            f"{found.uid}-h",
            HEAD_GROUP,
            cluster=found.name,
            ready=ready,
            deleting=going,
            node_silent_seconds=silent,
            uid=f"{found.uid}-h-{found.since}",
        )
        return (head, *workers)

    def _dashboard(self, name: str) -> ObservedRay:
        found = self._named(name)
        if found is None or not any(each.group == HEAD_GROUP and each.ready for each in self._pods_of(found)):
            return ObservedRay(Reachability.NOT_ASKED)
        if found.node_lost_since is not None:
            return inputs.silent_ray(seconds=float(TICK_SECONDS * (self.tick - found.node_lost_since)))
        if self.tick in self.scenario.silent_ticks:
            return inputs.silent_ray(seconds=float(TICK_SECONDS * (self.tick - self.scenario.silent_ticks.start)))
        trainer = found.newest
        return inputs.ray(gpus=self._gpus) if trainer is None else self._reported(trainer)

    def _status(self, trainer: Trainer) -> RayJobStatus:
        script, step = trainer.script, trainer.step(self.tick)
        hangs = script.hangs_at_step is not None and step >= script.hangs_at_step
        if trainer.stop_since is not None and self.tick >= trainer.stop_since + 2 and not hangs:
            return RayJobStatus.STOPPED
        if script.fails_at(step):
            return RayJobStatus.FAILED
        if step < STEPS or hangs:
            return RayJobStatus.RUNNING
        return RayJobStatus.FAILED if script.exit_code else RayJobStatus.SUCCEEDED

    def _reported(self, trainer: Trainer) -> ObservedRay:
        """What Ray and the trainer's run state report."""
        status, script = self._status(trainer), trainer.script
        loads = self.tick - trainer.since < LOADING_TICKS
        phases = {
            RayJobStatus.STOPPED: RunPhase.STOPPED,
            RayJobStatus.FAILED: RunPhase.FAILED,
            RayJobStatus.SUCCEEDED: RunPhase.COMPLETE,
        }
        phase = phases.get(status, RunPhase.STARTING if loads else RunPhase.RUNNING)
        code = script.exit_code or (1 if script.worker_lost_at_step is None else 75)
        codes = {RayJobStatus.FAILED: code, RayJobStatus.SUCCEEDED: 0}
        job = ObservedRayJob(trainer.submission_id, status, status.lower(), None, codes.get(status))
        return inputs.ray(job, self._state(trainer, phase), gpus=self._gpus)

    def _state(self, trainer: Trainer, phase: RunPhase) -> RunState:
        step = trainer.step(self.tick)
        steps_done = max(0, step - trainer.from_step)
        written = inputs.NOW + timedelta(seconds=TICK_SECONDS * (trainer.since + LOADING_TICKS + steps_done))
        state = inputs.run_state(phase, step=step, seconds_ago=(inputs.NOW - written).total_seconds())
        update: dict[str, object] = {"resumed_from_step": trainer.from_step or None}
        saved = trainer.saved_step or trainer.from_step
        if saved:
            update["checkpoint"] = CheckpointStatus(
                step=saved,
                uri=f"file:///rljob/storage/checkpoints/{saved}",
                digest="sha256:1",
                saved_at=timestamp(inputs.NOW + timedelta(seconds=TICK_SECONDS * saved)),
            )
        return state.model_copy(update=update)


def _asked_at(tick: int | None) -> str | None:
    """The value of a request that was made at this tick."""
    return timestamp(inputs.NOW + timedelta(seconds=TICK_SECONDS * tick)) if tick is not None else None


def _is_reached(found: Cluster) -> bool:
    """Whether the head and its node exist."""
    return not found.head_lost and found.node_lost_since is None


def unstarted_copy(scenario: Scenario) -> Scenario:
    """A copy of the scenario in its initial state."""
    return replace(scenario)
