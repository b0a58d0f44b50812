"""A whole look at a job's dashboard, by nobody who remembers a former one."""

from __future__ import annotations

import time

from rljob_operator.ray.client import Dashboard
from rljob_operator.ray.run_watcher import RunWatcher
from rljob_operator.reconcile.observed import ObservedRay


async def observe_dashboard(dashboard: Dashboard, submission_id: str | None) -> ObservedRay:
    """The nodes, and the submission where there is one. Never raises: what went wrong is in what is returned."""
    return await RunWatcher(time.monotonic).observe("", dashboard, submission_id)
