"""Stop hook of the head pod: asks the running trainer to stop, and waits until the trainer has saved and exited.

Ray's head does not forward the pod's SIGTERM to the driver of a Ray job. A stop through Ray's Jobs API sends SIGTERM to
the driver, and gives the driver time to save.
"""

from __future__ import annotations

import sys
import time

from rljob_api.constants import DASHBOARD_PORT
from rljob_trainer.pod.ray_jobs import RayJobs, RayJobsError
from rljob_trainer.settings import read_pod_settings

POLL_SECONDS = 0.5


def main() -> int:
    """Always returns 0, because a failing hook would end the pod immediately."""
    settings = read_pod_settings()
    try:
        stop_jobs(RayJobs(DASHBOARD_PORT, settings.ray_token), settings.grace_seconds)
    except Exception as error:
        print(f"stop_driver: {error}", file=sys.stderr)
    return 0


def stop_jobs(jobs: RayJobs, grace_seconds: float) -> bool:
    """Stops all Ray jobs of the head and waits until they have ended. Returns True if all have ended, False after
    `grace_seconds` or if the dashboard no longer listens. Retries after an error of a dashboard that still listens."""
    deadline = time.monotonic() + grace_seconds
    stopped_ids: set[str] = set()
    while True:
        try:
            unfinished = jobs.unfinished()
            if not unfinished:
                return True
            stopped_ids |= {
                identifier for identifier in unfinished if identifier not in stopped_ids and jobs.stop(identifier)
            }
        except RayJobsError as error:
            print(f"stop_driver: {error}", file=sys.stderr)
            if not jobs.is_listening():
                return False
        if time.monotonic() + POLL_SECONDS > deadline:
            return False
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
