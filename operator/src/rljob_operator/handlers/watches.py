"""Watches jobs, clusters, pods and Kueue's workloads with kopf.

kopf runs in a thread with its own event loop, because kopf cancels every task of its loop when it ends. Sometimes kopf
must be restarted: it checks only once which resources exist, and some errors of a watch end it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress

import kopf

from rljob_api.constants import API_GROUP, API_VERSION, LABEL_JOB_UID
from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, PODS, WORKLOADS, ResourceType
from rljob_operator.kube.connection import Connection
from rljob_operator.kube.projections import LABEL_CLUSTER_UID
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject

WATCHED = {
    JOBS: (API_GROUP, API_VERSION, JOBS.plural),
    CLUSTERS: ("ray.io", "v1", CLUSTERS.plural),
    PODS: ("", "v1", PODS.plural),
}
"""Group, version and plural of each kind, as kopf expects them."""
WATCHED_WITH_KUEUE = {**WATCHED, WORKLOADS: ("kueue.x-k8s.io", "v1beta2", WORKLOADS.plural)}
LABEL_SELECTORS = {CLUSTERS: LABEL_JOB_UID, PODS: LABEL_JOB_UID, WORKLOADS: LABEL_CLUSTER_UID}
FIRST_PAUSE_SECONDS = 1.0
"""Pause before kopf is restarted after it has ended by itself; it doubles each time."""
LONGEST_PAUSE_SECONDS = 30.0
"""Upper limit of that pause. A run of kopf that lasts longer resets the pause."""
IDLE_SECONDS = 0.05
PAGE_SIZE = 3
"""Objects per request with which kopf lists objects before it watches them. Unlike the operator's own listings, kopf
does not take smaller pages if objects are large, and a user may create objects of 1.5 MiB, which take up to 20 times as
much while they are handled. Larger pages are hardly faster."""
STOP_SECONDS = 5.0
CANCEL_SECONDS = 1.0
"""Time from the end of the first task of kopf to the cancellation of watchers that are still running."""

logger = logging.getLogger(__name__)


class Watches:
    """Runs all watches; with `kueue` also of Kueue's workloads. `on_event` is called, in the event loop of `run`, with
    the kind of object, the type of the event and the object. The type is empty for an object that existed before the
    watch."""

    def __init__(
        self,
        connection: Connection,
        namespaces: tuple[str, ...],
        on_event: Callable[[ResourceType, str, JsonObject], None],
        metrics: Metrics,
        kueue: bool = False,
    ) -> None:
        self._connection = connection
        self._namespaces = namespaces
        self._on_event = on_event
        self._metrics = metrics
        self._watched = WATCHED_WITH_KUEUE if kueue else WATCHED
        self._thread: _KopfThread | None = None

    async def run(self) -> None:
        """Watches until this call is cancelled. If kopf ends by itself, kopf is restarted."""
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_SECONDS
        while True:
            started = loop.time()
            thread = self._thread = _KopfThread(self._registry(loop), self._namespaces)
            try:
                await thread.run()
            finally:
                await thread.stop()
            if thread.stop_was_requested:
                continue
            self._metrics.watch_restarts.inc()
            if loop.time() - started > LONGEST_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            logger.warning("the watches ended unexpectedly; restarting them in %.0f s", pause)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)

    def restart(self) -> None:
        """Restarts the watches, so that kopf finds a resource that was installed after the start of kopf."""
        if self._thread is not None:
            self._thread.request_stop()

    def _registry(self, loop: asyncio.AbstractEventLoop) -> kopf.OperatorRegistry:
        """Handlers for kopf. They run in kopf's thread and pass each event to `loop` immediately."""
        registry = kopf.OperatorRegistry()

        # kopf passes many keyword arguments; the handlers need only a few of them.
        async def log_in(**_: object) -> kopf.ConnectionInfo:
            return await _credentials(self._connection)

        def handler(kind: ResourceType) -> Callable[..., Coroutine[None, None, None]]:
            async def on_event(event: kopf.RawEvent, **_: object) -> None:
                loop.call_soon_threadsafe(self._on_event, kind, event["type"] or "", event["object"])

            return on_event

        kopf.on.login(registry=registry)(log_in)
        for kind, resource in self._watched.items():
            kopf.on.event(*resource, registry=registry, id=kind.plural)(handler(kind))
        return registry


class _KopfThread:
    """One run of kopf in its thread."""

    def __init__(self, registry: kopf.OperatorRegistry, namespaces: tuple[str, ...]) -> None:
        self._registry = registry
        self._namespaces = namespaces
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_flag: asyncio.Event | None = None
        self.stop_was_requested = False

    async def run(self) -> None:
        """Runs kopf and returns when it has ended, for whatever reason."""
        main_loop = asyncio.get_running_loop()

        def run_thread() -> None:
            try:
                asyncio.run(self._run_kopf())
            except Exception:
                logger.exception("kopf failed")
            finally:
                # RuntimeError: the main event loop is already closed, because the process is about to exit.
                with suppress(RuntimeError):
                    main_loop.call_soon_threadsafe(self._ended.set)

        # A daemon thread: if kopf hangs while it stops, the process still exits.
        threading.Thread(target=run_thread, name="kopf", daemon=True).start()
        await self._ended.wait()

    def request_stop(self) -> None:
        """Asks kopf to stop."""
        self.stop_was_requested = True
        if self._loop is not None and self._stop_flag is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop_flag.set)

    async def stop(self) -> None:
        """Asks kopf to stop if it is still running, and waits up to `STOP_SECONDS`."""
        if self._ended.is_set():
            return
        self.request_stop()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            logger.warning("the watches did not stop within %.0f s", STOP_SECONDS)

    async def _run_kopf(self) -> None:
        self._stop_flag = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self.stop_was_requested:
            return
        this_task = asyncio.current_task()
        tasks = await kopf.spawn_tasks(
            registry=self._registry,
            settings=_settings(),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._stop_flag,
        )
        running = asyncio.create_task(kopf.run_tasks(tasks, ignored={this_task} if this_task else ()))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        while not (await asyncio.wait({running}, timeout=CANCEL_SECONDS))[0]:
            _cancel_watchers()
        await running


def _cancel_watchers() -> None:
    """Cancels kopf's watchers. Without this, kopf could wait forever for a watcher that waits for new credentials: kopf
    cancels the watcher and the task that pauses it at the same time, and a paused watcher ignores the cancellation and
    starts again."""
    for task in asyncio.all_tasks():
        if task.get_name().startswith("watcher for "):
            task.cancel()


class _EndlessDelays:
    """Pauses between the retries of one request, in seconds: they never end, so kopf never gives up. kopf starts a new
    iteration for each request."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.5, 1.0, 2.0, 4.0), itertools.repeat(8.0))


class _NoDiffs(kopf.DiffBaseStorage):
    """Switches off kopf's diffs. kopf would copy every object of an event to find out what has changed; no handler here
    uses that, and it took a quarter of this process's CPU time."""

    def build(self, **_: object) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: object) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: object) -> None:
        """Stores nothing."""


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = _NoDiffs()
    # The operator's role cannot list namespaces or CRDs.
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = _EndlessDelays()
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.chunk_size = PAGE_SIZE
    # kopf has a task for each object that had an event, and the task keeps the object until this time has passed. After
    # the first listing, all objects would be in memory at the same time.
    settings.queueing.idle_timeout = IDLE_SECONDS
    for kind, selector in LABEL_SELECTORS.items():
        settings.watching.label_selectors[WATCHED_WITH_KUEUE[kind]] = selector
    return settings


async def _credentials(connection: Connection) -> kopf.ConnectionInfo:
    return kopf.ConnectionInfo(
        server=connection.server,
        ca_path=connection.ca_file,
        insecure=not connection.verifies_certificate,
        token=await connection.token(),
        certificate_path=connection.certificate_file,
        private_key_path=connection.private_key_file,
    )
