"""Runs one reconcile pass over one job (observe, decide, act), and schedules the next pass."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.status import Progress, RLJobStatus
from rljob_operator.controller.effect_executor import EffectExecutor
from rljob_operator.controller.observe import Observation, Observer
from rljob_operator.controller.operator_context import OperatorContext
from rljob_operator.errors import OperatorError
from rljob_operator.kube.errors import (
    ConflictError,
    DefinitionOutdatedError,
    NotFoundError,
    StatusNotWrittenError,
    StatusUnreadableError,
    UnavailableError,
)
from rljob_operator.kube.observed_objects import JobObject
from rljob_operator.log import about
from rljob_operator.manifests.ownership import JobIdentity
from rljob_operator.raw_json import text_at
from rljob_operator.reconcile.decision import (
    ApplyNetworkPolicy,
    CreateCluster,
    Decision,
    DeleteCluster,
    DeleteJob,
    DumpStacks,
    Effect,
    EventReason,
    EventRecord,
    EventType,
    StopRayJob,
    SubmitRayJob,
    bounded_note,
)
from rljob_operator.reconcile.observed import EffectFailure, Reachability
from rljob_operator.reconcile.reconcile import reconcile
from rljob_operator.workqueue import WorkQueue

PASS_PAUSE_SECONDS = 1.0
"""Time from the end of a pass to the next pass over the same job, however many watch events arrive. Only the pass that
creates the cluster of a new attempt follows at once."""
AFTER_EFFECT_SECONDS = 1.0
"""Time from an effect to the next pass, which observes the effect's result."""
POLLS_PER_SECOND = 40.0
"""Scheduled dashboard polls of all jobs together: with more than 160 running jobs, each dashboard is polled less often
than every 4 s, down to `LONGEST_POLL_INTERVAL_SECONDS`."""
EXPLANATION_SECONDS = 8.0
"""Shortest time between two writes of a job's status that only explain (progress, messages); longer with many running
jobs: as long as the interval of polls. It is below 10 s, so that with the time of a poll and a write the progress of a
running trainer is still at most 10 s old."""
LONGEST_POLL_INTERVAL_SECONDS = 30.0
"""Longest time between two polls of a dashboard, however many jobs are running. It is limited because the operator
notices only at a poll that a deadline has passed."""
NAME_TAKEN_SECONDS = 5.0
"""Longest retry interval while another RayCluster has the name of the attempt's cluster. The other cluster is usually
being deleted, and the attempt fails after a minute, so the backoff must not grow longer."""
INCOMPLETE_CACHE_SECONDS = 0.5
"""Retry interval while the cache is incomplete: jobs wait until the first listing of all objects has succeeded."""
STATUS_FAULT_SECONDS = 600.0
"""Shortest time between two events that report a fault of the same job's status."""
DEFINITION_LOG_SECONDS = 60.0
"""Shortest time between two log lines that report an outdated CustomResourceDefinition."""

IRREVERSIBLE_EFFECTS = (CreateCluster, SubmitRayJob, DeleteCluster, DeleteJob)
"""Effects that cannot be undone. Before one of them, the job, its clusters and its pods are read again from the API
server, not from the cache."""
SLOW_EFFECTS = (StopRayJob, DumpStacks, ApplyNetworkPolicy)
"""Effects whose result is visible late or never, so an early next pass would not help."""

_ANY_PROGRESS = Progress(step=0, total_steps=0, updated_at="2026-01-01T00:00:00Z")

logger = logging.getLogger(__name__)


class JobKey(NamedTuple):
    """The key of a job in the work queue."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class _FailedEffect:
    """A failed effect, which is not retried before `retry_at` (time of the event loop)."""

    failure: EffectFailure
    retry_at: float


@dataclass
class _Memory:
    """What the operator remembers about a job between two passes. This only avoids requests, log lines and retries: if
    it is lost, the job still ends in the same way."""

    job_uid: str = ""
    """UID of the job. If the job is deleted and created again with the same name, the UID is another one."""
    failed_effect: _FailedEffect | None = None
    is_cache_stale: bool = False
    """Whether the job in the cache is known to be older than the job on the API server."""
    unknown_fields: tuple[str, ...] = ()
    """Unknown spec fields that were already logged."""
    explained_at: float | None = None
    """When the progress or a status that only explains was last written (monotonic seconds); after a restart of the
    operator, when it first saw the job. None if such a status may be written at once."""
    fault_reported_at: float | None = None
    """When an event last reported a fault of the job's status (time of the event loop); None if none did."""


class ReconcileLoop:
    """Runs the reconcile passes of one process."""

    def __init__(
        self, queue: WorkQueue[JobKey], observer: Observer, executor: EffectExecutor, context: OperatorContext
    ) -> None:
        self._queue = queue
        self._observer = observer
        self._executor = executor
        self._cache = context.cache
        self._defaults = context.defaults
        self._metrics = context.metrics
        self._clock = context.clock
        self._memories: dict[JobKey, _Memory] = {}
        self._polled_jobs: set[JobKey] = set()
        """Jobs whose dashboards are polled."""
        self._definition_logged_at: float | None = None

    async def work(self, key: JobKey) -> None:
        """Runs a pass and schedules the next one. Postpones the pass if the cache is incomplete. Nothing is raised:
        failures are retried and, except for conflicts, logged."""
        clock = asyncio.get_running_loop().time
        memory = self._memories.setdefault(key, _Memory())
        if not self._cache.is_complete:
            self._queue.add_after(key, INCOMPLETE_CACHE_SECONDS)
            return
        started, outcome = clock(), "failed"
        try:
            outcome = "done" if await self._pass(key, memory) else "deleted"
        except (ConflictError, NotFoundError):
            outcome = "conflict"
            memory.is_cache_stale = True
            self._queue.retry(key)
        except UnavailableError as error:
            outcome = "unavailable"
            seconds = self._queue.retry(key, error.retry_after_seconds)
            logger.warning("retry in %.1f s: %s", seconds, error, extra=about(str(key)))
        except DefinitionOutdatedError as error:
            outcome = "crd_outdated"
            self._queue.retry(key)
            self._log_outdated_definition(error)
        except (StatusUnreadableError, StatusNotWrittenError) as error:
            logger.error("retry in %.1f s: %s", self._queue.retry(key), error, extra=about(str(key)))
            await self._report_status_fault(key, memory, error)
        except OperatorError as error:
            logger.error("retry in %.1f s: %s", self._queue.retry(key), error, extra=about(str(key)))
        except Exception:
            seconds = self._queue.retry(key)
            logger.exception("unexpected error, a bug in the operator; retry in %.1f s", seconds, extra=about(str(key)))
        finally:
            self._metrics.passes.labels(outcome).inc()
            self._metrics.pass_seconds.observe(clock() - started)

    async def _pass(self, key: JobKey, memory: _Memory) -> bool:
        """Runs one pass. Returns False if there is nothing to do, because the job was deleted or is being deleted when
        the pass begins. If that happens during the pass, the next pass returns False."""
        job = await self._read(key, memory)
        if job is None or job.observed.deleting:
            self._forget(key)
            return False
        if memory.job_uid != job.observed.uid:
            memory.job_uid, memory.failed_effect = job.observed.uid, None
            # After a restart of the operator, the first 10 seconds are for writes that decide something.
            memory.explained_at = self._clock.monotonic() if job.observed.status.attempts else None
        self._log_unknown_fields(key, memory, job)
        failure = memory.failed_effect.failure if memory.failed_effect is not None else None
        observation = await self._observer.observe(job, failure)
        decision = reconcile(observation.observed, self._clock.now(), self._defaults)
        effects = self._due(decision, memory)
        if not observation.was_ray_asked and _is_irreversible(job.observed.status, decision.status, effects):
            # The dashboard has failed for a while, and is polled rarely. It may work again: nothing irreversible is
            # done without asking it.
            observation = await self._observer.observe(job, failure, ask_ray_at_once=True)
            decision = reconcile(observation.observed, self._clock.now(), self._defaults)
            effects = self._due(decision, memory)
        was_polled = observation.observed.ray.reachability is not Reachability.NOT_ASKED
        self._note_poll(key, was_polled)
        if _is_irreversible(job.observed.status, decision.status, effects):
            again = await self._observer.observe_again(job, observation, failure)
            if again is None:
                memory.is_cache_stale = True
                self._queue.add(key)
                return True
            job, observation = again
            decision = reconcile(observation.observed, self._clock.now(), self._defaults)
            effects = self._due(decision, memory)
        if observation.observed.forbidden is not None:
            # Without permission to read clusters or pods, the state may be stale: do nothing that cannot be undone.
            effects = tuple(effect for effect in effects if not isinstance(effect, IRREVERSIBLE_EFFECTS))
        await self._act(key, job, decision, effects, observation)
        self._schedule_next(key, decision, effects, was_polled)
        if _is_cleaned_up(decision.status) and not decision.effects:
            self._forget(key)
        return True

    async def _act(
        self, key: JobKey, job: JobObject, decision: Decision, effects: tuple[Effect, ...], observation: Observation
    ) -> None:
        if not effects and self._should_wait(key, job.observed.status, decision.status):
            # An event about an alarm is posted together with the status that has the alarm.
            decision = replace(decision, status=job.observed.status, events=())
        version = await self._executor.write_status(job, decision)
        try:
            failure = await self._executor.execute(effects, observation, version)
            # If effects were left out and the others succeeded, the earlier failure stays recorded.
            if failure is not None or len(effects) == len(decision.effects):
                self._record_result(key, failure)
        finally:
            # Post events even if an effect raised: the status is already written, so no later pass would post them.
            await self._executor.post(decision.events, job.observed.identity)

    def _should_wait(self, key: JobKey, before: RLJobStatus, after: RLJobStatus) -> bool:
        """Whether not to write a status now, because it only explains and such a status was written a short time ago.
        Then schedules the next pass for the time when it may be written."""
        memory, now = self._memories[key], self._clock.monotonic()
        if before == after:
            return False
        if without_informational_fields(before) != without_informational_fields(after):
            if before.progress != after.progress:
                # This write also has the newest progress, such as one that reports a checkpoint.
                memory.explained_at = now
            return False
        pause = max(EXPLANATION_SECONDS, self._poll_interval_seconds)
        if memory.explained_at is not None and now < memory.explained_at + pause:
            self._queue.add_after(key, max(memory.explained_at + pause - now, PASS_PAUSE_SECONDS))
            return True
        memory.explained_at = now
        return False

    async def _read(self, key: JobKey, memory: _Memory) -> JobObject | None:
        """Reads the job from the cache. Reads it from the API server instead if the cached job is stale or only a
        trimmed copy, as for jobs that are finished and cleaned up. Returns None if the job does not exist."""
        if memory.is_cache_stale or self._cache.is_trimmed(*key):
            try:
                job = await self._observer.read_job(*key)
            except NotFoundError:
                return None
            memory.is_cache_stale = False
            return job
        return self._observer.known_job(*key)

    async def _report_status_fault(
        self, key: JobKey, memory: _Memory, error: StatusUnreadableError | StatusNotWrittenError
    ) -> None:
        """Counts the fault, and posts an event on the job, because no condition can show it. The event is repeated at
        most every `STATUS_FAULT_SECONDS`."""
        is_unreadable = isinstance(error, StatusUnreadableError)
        self._metrics.status_faults.labels("unreadable" if is_unreadable else "not_written").inc()
        now, uid = asyncio.get_running_loop().time(), text_at(self._cache.job(*key), "metadata", "uid")
        is_reported = memory.fault_reported_at is not None and now < memory.fault_reported_at + STATUS_FAULT_SECONDS
        if is_reported or not uid:
            return
        memory.fault_reported_at = now
        reason = EventReason.STATUS_UNREADABLE if is_unreadable else EventReason.STATUS_NOT_WRITTEN
        event = EventRecord(EventType.WARNING, reason, bounded_note(str(error)))
        await self._executor.post([event], JobIdentity(key.namespace, key.name, uid))

    def _log_unknown_fields(self, key: JobKey, memory: _Memory, job: JobObject) -> None:
        found = job.observed.unknown_fields
        if found and found != memory.unknown_fields:
            logger.warning(
                "the spec has fields that this operator does not know and ignores: %s",
                ", ".join(found),
                extra=about(str(key)),
            )
        memory.unknown_fields = found

    def _record_result(self, key: JobKey, failure: EffectFailure | None) -> None:
        """Records a failed effect and when it is retried. If `failure` is None, all effects of the decision have
        succeeded: then the record is cleared and the backoff is reset."""
        memory = self._memories[key]
        if failure is None:
            memory.failed_effect = None
            self._queue.forget_failures(key)
        else:
            seconds = self._queue.retry(key)
            if failure.reason is Reason.NAME_CONFLICT:
                seconds = min(seconds, NAME_TAKEN_SECONDS)
            memory.failed_effect = _FailedEffect(failure, asyncio.get_running_loop().time() + seconds)

    def _due(self, decision: Decision, memory: _Memory) -> tuple[Effect, ...]:
        """The effects of the decision, without those whose kind has failed and is still in backoff."""
        failed_effect = memory.failed_effect
        if failed_effect is None or asyncio.get_running_loop().time() >= failed_effect.retry_at:
            return decision.effects
        return tuple(effect for effect in decision.effects if effect.kind is not failed_effect.failure.kind)

    def _schedule_next(self, key: JobKey, decision: Decision, effects: tuple[Effect, ...], was_polled: bool) -> None:
        """Schedules the next pass. The queue keeps the earliest of several times, so each `add_after` here can only
        make the pass earlier. `effects`: the effects that this pass has tried."""
        seconds = decision.requeue_after_seconds
        if seconds != 0:
            self._queue.pause(key, PASS_PAUSE_SECONDS)
        if seconds is not None:
            if decision.effects:
                seconds = max(seconds, AFTER_EFFECT_SECONDS)
            if was_polled and seconds > 0:
                seconds = max(seconds, self._poll_interval_seconds)
            self._queue.add_after(key, seconds)
        failed_effect = self._memories[key].failed_effect
        if failed_effect is None and any(not isinstance(effect, SLOW_EFFECTS) for effect in effects):
            # The result of creating, starting or deleting is visible soon.
            self._queue.add_after(key, AFTER_EFFECT_SECONDS)
        if failed_effect is not None:
            self._queue.add_after(key, failed_effect.retry_at - asyncio.get_running_loop().time())

    @property
    def _poll_interval_seconds(self) -> float:
        """Shortest time between two scheduled polls of a dashboard, with the present number of running jobs."""
        return min(LONGEST_POLL_INTERVAL_SECONDS, len(self._polled_jobs) / POLLS_PER_SECOND)

    def _note_poll(self, key: JobKey, was_polled: bool) -> None:
        """Notes whether the pass has polled the job's dashboard."""
        if was_polled:
            self._polled_jobs.add(key)
        else:
            self._polled_jobs.discard(key)

    def _forget(self, key: JobKey) -> None:
        self._memories.pop(key, None)
        self._polled_jobs.discard(key)
        self._observer.forget(*key)
        self._queue.forget_failures(key)

    def _log_outdated_definition(self, error: DefinitionOutdatedError) -> None:
        """Logs one line a minute, because all jobs have the same problem."""
        now = self._clock.monotonic()
        if self._definition_logged_at is None or now - self._definition_logged_at >= DEFINITION_LOG_SECONDS:
            self._definition_logged_at = now
            logger.error("%s", error)


def _is_irreversible(before: RLJobStatus, after: RLJobStatus, effects: tuple[Effect, ...]) -> bool:
    """Whether the pass is about to do something that cannot be undone: one of `IRREVERSIBLE_EFFECTS`, or a status that
    ends an attempt or the job, or changes whether the job is cleaned up."""
    if any(isinstance(effect, IRREVERSIBLE_EFFECTS) for effect in effects):
        return True
    newest = after.attempts[-1] if after.attempts else None
    if newest is not None and newest.cluster_uid is not None and newest.number > _num_attempts(before):
        # An attempt that starts on the cluster of the one before it: no former trainer may run there.
        return True
    if after.result is not None and (before.result is None or _is_cleaned_up(after) != _is_cleaned_up(before)):
        return True
    return _end_times(before) != _end_times(after)


def _num_attempts(status: RLJobStatus) -> int:
    return status.attempts[-1].number if status.attempts else 0


def without_informational_fields(status: RLJobStatus) -> RLJobStatus:
    """The status without fields that only inform people and change often: numbers of the progress, messages, alarms,
    and when an attempt made progress. Whether there is any progress is kept."""
    conditions = tuple(
        each.model_copy(update={"message": ""})
        for each in status.conditions
        if each.type != ConditionType.TRAINING_HEALTHY
    )
    attempts = tuple(
        each.model_copy(update={"progressed_at": None, "run_state_at": None}) if each.ended is None else each
        for each in status.attempts
    )
    progress = None if status.progress is None else _ANY_PROGRESS
    explained: dict[str, object] = {"conditions": conditions, "attempts": attempts, "progress": progress, "alarms": ()}
    return status.model_copy(update=explained)


def _is_cleaned_up(status: RLJobStatus) -> bool:
    """Whether the job is finished and nothing of it is left to clean up."""
    return status.result is not None and status.result.cleaned_up_at is not None


def _end_times(status: RLJobStatus) -> Mapping[int, str]:
    """The end times of the attempts that have ended, by attempt number."""
    return {attempt.number: attempt.ended for attempt in status.attempts if attempt.ended is not None}
