"""The operator from start to end: connect, wait to lead, work, stop."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from datetime import UTC, datetime

from rljob_operator.controller.act import Actor
from rljob_operator.controller.loop import Controller, JobKey
from rljob_operator.controller.observe import Observer
from rljob_operator.handlers.health import Parts, health_pages, metrics_pages
from rljob_operator.handlers.http_pages import serving
from rljob_operator.handlers.leadership import Leadership, LeadershipLostError
from rljob_operator.handlers.relist import Relist
from rljob_operator.handlers.watches import Watches
from rljob_operator.kube.client import KubeClient
from rljob_operator.kube.connection import Connection, load_connection
from rljob_operator.kube.objects import KubeObjects
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.metrics import Metrics
from rljob_operator.ray.client import RayClient
from rljob_operator.settings import Settings, read_token_keys
from rljob_operator.workqueue import Slots, WorkQueue, work_through

STOP_SECONDS = 3.0
"""For passes that are under way when the operator is told to stop."""

logger = logging.getLogger(__name__)


async def run_operator(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT. Raises SettingsError, LeadershipLostError, or OSError where a port is taken."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    read_token_keys(settings.token_keys_folder)
    connection = await load_connection(settings.kubeconfig)
    metrics, parts = Metrics(), Parts()
    async with AsyncExitStack() as stack:
        kube = await stack.enter_async_context(KubeClient(connection, metrics))
        ray = await stack.enter_async_context(RayClient(metrics))
        await stack.enter_async_context(serving(settings.health_port, health_pages(parts)))
        await stack.enter_async_context(serving(settings.metrics_port, metrics_pages(metrics)))
        objects = KubeObjects(kube)
        leadership = Leadership(objects, settings.pod_namespace, settings.lease_name, settings.pod_name)
        if settings.leader_election and not await _first(told, leadership.acquire()):
            return
        worker = _Worker(settings, connection, objects, ray, metrics, parts)
        worker.start()
        metrics.leader.set(1)
        try:
            await _first(told, leadership.hold() if settings.leader_election else _for_ever())
        except LeadershipLostError:
            # Another replica may write from now on.
            await worker.stop(patience_seconds=0.0)
            raise
        logger.info("stopping")
        await worker.stop(patience_seconds=STOP_SECONDS)
        if settings.leader_election:
            await leadership.release()


class _Worker:
    """What only the leader does."""

    def __init__(
        self,
        settings: Settings,
        connection: Connection,
        objects: KubeObjects,
        ray: RayClient,
        metrics: Metrics,
        parts: Parts,
    ) -> None:
        self._parts = parts
        self._queue: WorkQueue[JobKey] = WorkQueue(random.random)
        metrics.watch_queue(
            lambda: self._queue.num_waiting, lambda: self._queue.num_delayed, lambda: self._queue.num_working
        )
        self._slots = Slots(settings.num_workers)
        defaults = Defaults(
            trainer_image=settings.trainer_image,
            ray_version=settings.ray_version,
            image_pull_policy=settings.image_pull_policy,
            operator_namespace=settings.pod_namespace,
            operator_pod_labels=settings.pod_labels,
        )
        observer = Observer(objects, ray, settings, self._slots, utc_now)
        actor = Actor(objects, settings, defaults, self._slots, metrics, utc_now)
        self._controller = Controller(self._queue, objects, observer, actor, defaults, metrics, utc_now)
        self._watches = Watches(connection, settings.namespaces, self._queue.add, metrics)
        self._relist = Relist(objects, settings.namespaces, self._queue.add, self._watches.restart, metrics)

    def start(self) -> None:
        """Begins to work."""
        self._parts.start("workers", work_through(self._queue, self._slots, self._controller.work))
        self._parts.start("relist", self._relist.run())
        self._parts.start("watches", self._watches.run())

    async def stop(self, patience_seconds: float) -> None:
        """Ends all work; passes that are under way get so long to end by themselves."""
        self._queue.close()
        await self._parts.stop("relist")
        await self._parts.stop("workers", patience_seconds)
        await self._parts.stop("watches")


async def _first(told: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Whether the work ended, and not `told` came first. Raises what the work raises."""
    task, waiter = asyncio.create_task(work), asyncio.create_task(told.wait())
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


async def _for_ever() -> None:
    await asyncio.Event().wait()


def utc_now() -> datetime:
    """The time, in UTC."""
    return datetime.now(UTC)
