"""Which jobs need a look, and when. A job that has ended, and of which nothing is left, needs none."""

from __future__ import annotations

from datetime import datetime

from rljob_operator.kube.observed_objects import time_at
from rljob_operator.kube.settled import is_settled
from rljob_operator.raw_json import JsonObject, integer_at


def seconds_until_look(job: JsonObject, now: datetime) -> float | None:
    """0 for a job that needs a look now; None for one that needs none, ever. Reads a job as it is stored, or what is
    kept of it."""
    if not is_settled(job):
        return 0.0
    lifetime = integer_at(job, "spec", "runPolicy", "ttlSecondsAfterFinished")
    ended = time_at(job, "status", "result", "at")
    if lifetime is None or ended is None:
        return None
    return max(0.0, lifetime - (now - ended).total_seconds())
