"""One pass over one job: read, observe, decide, act; and when to look at it again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from rljob_operator.controller.act import Actor, kind_of
from rljob_operator.controller.observe import Observer
from rljob_operator.errors import OperatorError
from rljob_operator.kube.errors import ConflictError, NotFoundError, UnavailableError
from rljob_operator.kube.objects import JOBS, KubeObjects
from rljob_operator.kube.observed_objects import JobObject, job_object
from rljob_operator.log import about
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.metrics import Metrics
from rljob_operator.reconcile.observed import EffectFailure, Reachability
from rljob_operator.reconcile.plan_types import Plan, StopJob
from rljob_operator.reconcile.reconcile import reconcile
from rljob_operator.workqueue import WorkQueue

DASHBOARD_PAUSE_SECONDS = 1.5
"""At least this long between two looks at a job's dashboard, however many events there are."""
AFTER_EFFECT_SECONDS = 1.0

logger = logging.getLogger(__name__)


class JobKey(NamedTuple):
    """What the work queue holds."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class _Held:
    """An effect that failed is not tried again before `until` (time of the event loop)."""

    failure: EffectFailure
    until: float


class Controller:
    """The passes of one process. What it remembers of a job only spares work: without it the same would happen."""

    def __init__(
        self,
        queue: WorkQueue[JobKey],
        objects: KubeObjects,
        observer: Observer,
        actor: Actor,
        defaults: Defaults,
        metrics: Metrics,
        now: Callable[[], datetime],
    ) -> None:
        self._queue = queue
        self._objects = objects
        self._observer = observer
        self._actor = actor
        self._defaults = defaults
        self._metrics = metrics
        self._now = now
        self._held: dict[JobKey, _Held] = {}
        self._asked: dict[JobKey, float] = {}

    async def work(self, key: JobKey) -> None:
        """A pass, and the next one in time. Failures are logged and tried again; nothing is raised."""
        clock = asyncio.get_running_loop().time
        asked = self._asked.get(key)
        if asked is not None and clock() < asked + DASHBOARD_PAUSE_SECONDS:
            self._queue.add_after(key, asked + DASHBOARD_PAUSE_SECONDS - clock())
            return
        started, outcome = clock(), "failed"
        try:
            await self._pass(key)
            outcome = "done"
        except NotFoundError:
            outcome = "gone"
            self._queue.add(key)
        except ConflictError:
            outcome = "conflict"
            self._queue.retry(key)
        except UnavailableError as error:
            outcome = "unavailable"
            seconds = self._queue.retry(key, error.retry_after_seconds)
            logger.warning("again in %.1f s: %s", seconds, error, extra=about(str(key)))
        except OperatorError as error:
            logger.error("again in %.1f s: %s", self._queue.retry(key), error, extra=about(str(key)))
        except Exception:
            seconds = self._queue.retry(key)
            logger.exception("this is a mistake in the operator; again in %.1f s", seconds, extra=about(str(key)))
        finally:
            self._metrics.passes.labels(outcome).inc()
            self._metrics.pass_seconds.observe(clock() - started)

    async def _pass(self, key: JobKey) -> None:
        job = await self._read(key)
        if job is None or job.observed.deleting:
            self._forget(key)
            return
        held = self._held.get(key)
        observation = await self._observer.observe(job, held.failure if held else None)
        if observation.observed.ray.reachability is not Reachability.NOT_ASKED:
            self._asked[key] = asyncio.get_running_loop().time()
        plan = reconcile(observation.observed, self._now(), self._defaults)
        await self._actor.write_status(job, plan)
        try:
            if not self._must_wait(plan, held):
                self._note(key, await self._actor.carry_out(plan, observation))
        finally:
            # The status that they belong to is written; nobody would post them later.
            await self._actor.post(plan, job.observed)
        self._plan_next(key, plan)

    async def _read(self, key: JobKey) -> JobObject | None:
        try:
            return job_object(await self._objects.get(JOBS, key.namespace, key.name))
        except NotFoundError:
            return None

    def _note(self, key: JobKey, failure: EffectFailure | None) -> None:
        """Remembers an effect that failed, and until when it is left alone."""
        if failure is None:
            self._held.pop(key, None)
            self._queue.forget_failures(key)
        else:
            seconds = self._queue.retry(key)
            self._held[key] = _Held(failure, asyncio.get_running_loop().time() + seconds)

    def _must_wait(self, plan: Plan, held: _Held | None) -> bool:
        """Whether the plan holds the effect that failed a moment ago."""
        if held is None or not plan.effects or kind_of(plan.effects[0]) is not held.failure.kind:
            return False
        return asyncio.get_running_loop().time() < held.until

    def _plan_next(self, key: JobKey, plan: Plan) -> None:
        """The earliest of all times wins, so each of these only brings the next pass forward."""
        if plan.requeue_after_seconds is not None:
            self._queue.add_after(key, plan.requeue_after_seconds)
        if any(not isinstance(effect, StopJob) for effect in plan.effects):
            # What was made, started or removed shows soon; a trainer takes its time to stop.
            self._queue.add_after(key, AFTER_EFFECT_SECONDS)
        held = self._held.get(key)
        if held is not None:
            self._queue.add_after(key, held.until - asyncio.get_running_loop().time())

    def _forget(self, key: JobKey) -> None:
        self._held.pop(key, None)
        self._asked.pop(key, None)
        self._queue.forget_failures(key)
