"""Runs the operator from start to end: connect, wait for leadership, work, stop."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from datetime import UTC, datetime

from rljob_operator.controller.effect_executor import EffectExecutor
from rljob_operator.controller.observe import Observer
from rljob_operator.controller.operator_context import OperatorContext
from rljob_operator.controller.reconcile_loop import JobKey, ReconcileLoop
from rljob_operator.handlers.health import BackgroundTasks, health_pages, metrics_pages, serving
from rljob_operator.handlers.leader_election import LeadershipLostError, LeaseThread
from rljob_operator.handlers.other_releases import OtherReleases, status_manager
from rljob_operator.handlers.relist import Relist
from rljob_operator.handlers.watch_events import WatchEventRouter
from rljob_operator.handlers.watches import Watches
from rljob_operator.kube.allowed_calls import KubeObjects, ResourceType
from rljob_operator.kube.cache import ObjectCache
from rljob_operator.kube.client import KubeClient
from rljob_operator.kube.connection import Connection, load_connection
from rljob_operator.kube.server_clock import Ages, ServerClock
from rljob_operator.kube.server_history import ServerHistory, StorageRestoredError
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject
from rljob_operator.ray.client import RayClient
from rljob_operator.settings import Settings, read_token_keys
from rljob_operator.workqueue import Slots, WorkQueue, work_through

STOP_SECONDS = 3.0
"""How long running passes may take to finish when the operator stops."""

logger = logging.getLogger(__name__)


async def run_operator(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT. Raises SettingsError, LeadershipLostError, StorageRestoredError, or OSError if a
    port is in use."""
    stop_requested = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_requested.set)
    # Check the keys now: a replica that cannot use its keys must not wait for leadership.
    read_token_keys(settings.token_keys_folder)
    defaults = _defaults(settings)
    connection = await load_connection(settings.kubeconfig)
    metrics, tasks = Metrics(), BackgroundTasks()
    clock = ServerClock(time.monotonic, _node_time)
    async with AsyncExitStack() as stack:
        kube = await stack.enter_async_context(KubeClient(connection, metrics, clock))
        ray = await stack.enter_async_context(RayClient(metrics))
        # Metrics first: as soon as the operator reports that it is healthy, its metrics can be read.
        await stack.enter_async_context(serving(settings.metrics_port, metrics_pages(metrics)))
        await stack.enter_async_context(serving(settings.health_port, health_pages(tasks)))
        lease = LeaseThread(settings, metrics, clock) if settings.leader_election else None
        if lease is not None:
            lease.start()
            stack.push_async_callback(lease.stop)
            if not await _first(stop_requested, lease.acquired()):
                return
        cache, slots = ObjectCache(settings.namespaces or (None,)), Slots(settings.max_concurrent_reconciles)
        objects = KubeObjects(kube, status_manager(settings))
        may_act = lease.may_act if lease is not None else _always
        context = OperatorContext(objects, cache, settings, defaults, slots, metrics, clock, may_act)
        leader_tasks = _LeaderTasks(context, connection, ray, tasks)
        leader_tasks.start()
        metrics.leader.set(1)
        try:
            lost = lease.lost() if lease is not None else _wait_for_ever()
            await _first(stop_requested, _either(lost, leader_tasks.history.restored()))
        except (LeadershipLostError, StorageRestoredError):
            # Another replica may write from now on, or what the cache knows is wrong: running passes get no time to
            # finish.
            await leader_tasks.stop(patience_seconds=0.0)
            raise
        logger.info("stopping")
        await leader_tasks.stop(patience_seconds=STOP_SECONDS)


def _defaults(settings: Settings) -> Defaults:
    return Defaults(
        trainer_image=settings.trainer_image,
        ray_version=settings.ray_version,
        image_pull_policy=settings.image_pull_policy,
        operator_namespace=settings.pod_namespace,
        operator_pod_labels=settings.pod_labels,
        allowed_label_prefixes=settings.allowed_label_prefixes,
        service_account_names=settings.service_account_names,
        run_as_user=settings.run_as_user,
        network_policy=settings.job_network_policy,
    )


class _LeaderTasks:
    """The tasks that only the leader runs: watches, relists and reconcile passes."""

    def __init__(
        self, context: OperatorContext, connection: Connection, ray: RayClient, tasks: BackgroundTasks
    ) -> None:
        self._tasks = tasks
        self._slots = context.slots
        self._queue: WorkQueue[JobKey] = WorkQueue(random.random, _namespace_of)
        context.metrics.read_queue_from(
            lambda: self._queue.num_waiting, lambda: self._queue.num_delayed, lambda: self._queue.num_working
        )
        context.metrics.read_cache_from(lambda: context.cache.num_objects)
        ages = Ages(context.clock)
        self._reconcile_loop = ReconcileLoop(
            self._queue, Observer(context, ray, ages), EffectExecutor(context), context
        )
        namespaces, kueue = context.settings.namespaces, context.settings.kueue
        events = WatchEventRouter(context.cache, self._queue, context.clock)
        others = OtherReleases(status_manager(context.settings), context.clock, context.metrics)

        def on_event(kind: ResourceType, event_type: str, raw: JsonObject) -> None:
            others.on_event(kind, raw)
            events.on_event(kind, event_type, raw)

        self._watches = Watches(connection, namespaces, on_event, context.metrics, kueue)
        self.history = ServerHistory(context.cache)
        self._relist = Relist(
            context.objects,
            namespaces or (None,),
            context.cache,
            ages,
            events,
            self._watches.restart,
            context.metrics,
            self.history,
            kueue=kueue,
            network_policies=context.defaults.network_policy.enabled,
        )

    def start(self) -> None:
        """Starts all tasks."""
        self._tasks.start("reconcile passes", work_through(self._queue, self._slots, self._reconcile_loop.work))
        self._tasks.start("relist", self._relist.run())
        self._tasks.start("watches", self._watches.run())

    async def stop(self, patience_seconds: float) -> None:
        """Stops all tasks; running passes get `patience_seconds` to finish."""
        self._queue.close()
        await self._tasks.stop("relist")
        await self._tasks.stop("reconcile passes", patience_seconds)
        await self._tasks.stop("watches")


async def _first(stop_requested: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Waits until the work ends or a stop is requested. Returns whether the work ended. Raises what the work raises."""
    task, waiter = asyncio.create_task(work), asyncio.create_task(stop_requested.wait())
    try:
        await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        task.cancel()
        waiter.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)


async def _either(*waits: Coroutine[None, None, None]) -> None:
    """Waits until one of several waits ends. Raises what it raises."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_ever() -> None:
    await asyncio.Event().wait()


def _namespace_of(key: JobKey) -> str:
    return key.namespace


def _always() -> bool:
    return True


def _node_time() -> datetime:
    return datetime.now(UTC)
