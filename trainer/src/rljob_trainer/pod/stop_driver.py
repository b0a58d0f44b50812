"""Stop hook of the head pod: asks the running trainer to stop, and waits until it has saved and ended.

KubeRay's head does not pass the pod's SIGTERM on to the driver of a Ray job; Ray's own stop does, and gives it time.
"""

from __future__ import annotations

import sys
import time

from rljob_api.constants import DASHBOARD_PORT
from rljob_trainer.pod.ray_jobs import RayJobs, RayJobsError
from rljob_trainer.settings import read_pod_settings

POLL_SECONDS = 0.5


def main() -> int:
    """Always 0: a hook that fails would end the pod at once."""
    settings = read_pod_settings()
    try:
        stop_jobs(RayJobs(DASHBOARD_PORT, settings.ray_token), settings.grace_seconds)
    except Exception as error:
        print(f"stop_driver: {error}", file=sys.stderr)
    return 0


def stop_jobs(jobs: RayJobs, grace_seconds: float) -> bool:
    """Stops all jobs of the head and waits for their end; True when none is left, False when the time is over or the
    head is gone. A dashboard that answers with errors is asked again."""
    deadline = time.monotonic() + grace_seconds
    asked: set[str] = set()
    while True:
        try:
            unfinished = jobs.unfinished()
            if not unfinished:
                return True
            asked |= {identifier for identifier in unfinished if identifier not in asked and jobs.stop(identifier)}
        except RayJobsError as error:
            print(f"stop_driver: {error}", file=sys.stderr)
            if not jobs.is_listening():
                return False
        if time.monotonic() + POLL_SECONDS > deadline:
            return False
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
