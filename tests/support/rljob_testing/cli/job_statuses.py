"""Job statuses as the operator writes them, for tests of commands that read them."""

from __future__ import annotations

from rljob_testing.cli.job_cluster import Json


def condition(kind: str, status: str, reason: str, since: str, message: str = "") -> Json:
    """One condition of a job's status."""
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since}


def full_status() -> Json:
    """The status of a job in training: step 12 of 80, written at 12:29:50."""
    day = "2026-01-31T"
    return {
        "observedGeneration": 1,
        "phase": "Running",
        "conditions": [
            condition("SpecValid", "True", "Valid", f"{day}12:00:00Z"),
            condition("ClusterReady", "True", "Ready", f"{day}12:05:00Z", "3 of 3 pods are ready"),
            condition("PlacementFeasible", "True", "Feasible", f"{day}12:05:00Z"),
            condition("JobSubmitted", "True", "Submitted", f"{day}12:06:00Z"),
            condition("Progressing", "True", "Training", f"{day}12:10:00Z"),
            condition("Checkpointed", "True", "Saved", f"{day}12:29:10Z"),
        ],
        "progress": {
            "step": 12,
            "totalSteps": 80,
            "rewardMean": 0.4125,
            "evalScore": 0.25,
            "tokensPerSecond": 1234.6,
            "updatedAt": f"{day}12:29:50Z",
            "etaSeconds": 570,
        },
        "checkpoint": {
            "step": 10,
            "uri": "pvc://results/small/checkpoints/step-000010",
            "digest": "d",
            "savedAt": f"{day}12:29:10Z",
        },
        "attempts": [
            {
                "number": 1,
                "cluster": "small-1",
                "state": "Running",
                "started": f"{day}12:02:00Z",
                "runningSince": f"{day}12:06:00Z",
            }
        ],
        "pools": [{"name": "main", "desired": 2, "ready": 2}],
    }


SINCE = "2026-01-31T12:20:00Z"

ATTEMPT = {"number": 1, "cluster": "small-1", "started": SINCE, "state": "Running"}

ENDED = ATTEMPT | {"state": "Ended", "ended": SINCE, "outcome": "Failed", "reason": "HeadLost"}

COUNTERS = {"attempts": 1}

RUNNING = full_status() | {"attempts": [ATTEMPT], "counters": COUNTERS}

FAILED = {"outcome": "Failed", "reason": "OutOfMemory", "message": "head: 8Gi", "at": SINCE}

COMPLETE = FAILED | {"outcome": "Succeeded", "reason": "Succeeded"}

BETWEEN = {"reason": "HeadLost", "failureClass": "Infrastructure", "notBefore": "2026-01-31T12:31:00Z"}
