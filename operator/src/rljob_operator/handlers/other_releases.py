"""Notices another installation of the operator that handles the same jobs, for example two releases of the chart that
watch one namespace. Both would create and delete clusters of these jobs.

Each installation writes the status of jobs with a field manager of its own. The API server records in
`metadata.managedFields` which field manager has written last, and when, so this needs no permission.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from rljob_operator.kube.allowed_calls import FIELD_MANAGER, JOBS, ResourceType
from rljob_operator.kube.observed_objects import time_at
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.log import about
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, objects_at, text_at
from rljob_operator.settings import Settings

START_SECONDS = 5.0
"""What another installation wrote within this time after the first event does not count: it may be a predecessor that
is just stopping."""
LOG_SECONDS = 60.0
"""Shortest time between two log lines."""
MAX_MANAGER_LENGTH = 128

logger = logging.getLogger(__name__)


def status_manager(settings: Settings) -> str:
    """The field manager with which this installation writes the status of jobs, equal in all of its replicas."""
    return f"{FIELD_MANAGER}/{settings.pod_namespace}/{settings.lease_name}"[:MAX_MANAGER_LENGTH]


class OtherReleases:
    """Reports jobs whose status another installation writes while this one is running."""

    def __init__(self, own_manager: str, clock: ServerClock, metrics: Metrics) -> None:
        self._own_manager = own_manager
        self._clock = clock
        self._metrics = metrics
        self._since: datetime | None = None
        """Writes after this time count; None before the first event."""
        self._logged_at: float | None = None

    def on_event(self, kind: ResourceType, raw: JsonObject) -> None:
        """Handles a watch event. `raw`: the object as the API server sent it."""
        if kind != JOBS or not self._clock.is_steady:
            return
        if self._since is None:
            self._since = self._clock.now() + timedelta(seconds=START_SECONDS)
        for entry in objects_at(raw, "metadata", "managedFields"):
            manager = text_at(entry, "manager")
            if not manager.startswith(f"{FIELD_MANAGER}/") or manager == self._own_manager:
                continue
            written = time_at(entry, "time")
            # After an upgrade that renames the release, the entry of the former one stays in the object, with its time.
            if text_at(entry, "subresource") == "status" and written is not None and written > self._since:
                self._report(raw, manager)

    def _report(self, job: JsonObject, manager: str) -> None:
        """Counts the event, and logs one line a minute."""
        self._metrics.foreign_status_events.inc()
        now = self._clock.monotonic()
        if self._logged_at is not None and now - self._logged_at < LOG_SECONDS:
            return
        self._logged_at = now
        logger.error(
            "another installation of the operator (namespace and Lease: %s) also handles this job, so both create and"
            " delete its RayClusters; change watchNamespaces of one installation, or uninstall one",
            manager.partition("/")[2],
            extra=about(f"{text_at(job, 'metadata', 'namespace')}/{text_at(job, 'metadata', 'name')}"),
        )
