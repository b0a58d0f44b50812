"""Scripts for the stand-ins of KubeRay and of Ray's dashboards: the course of a cluster's pods and of a trainer."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PodScript:
    """The state of a pod, in the terms of the kubelet."""

    phase: str = "Running"
    ready: bool = True
    scheduling_message: str | None = None
    """The scheduler's message if it finds no node."""
    waiting: tuple[str, str] | None = None
    """Waiting reason and message of the container `ray`."""
    ended: tuple[str, int] | None = None
    """Termination reason and exit code of the container `ray`."""
    restarts: int = 0
    disruption: tuple[str, str] | None = None
    """Reason and message of the condition DisruptionTarget."""
    event: tuple[str, str] | None = None
    """Reason and message of an event about the pod."""
    scheduled_seconds_ago: float = 0.0
    node_lost: bool = False
    """Whether the node is NotReady."""


READY = PodScript()

STARTING = PodScript(phase="Pending", ready=False, waiting=("ContainerCreating", ""))


@dataclass(frozen=True)
class ClusterScript:
    """The course of a RayCluster. Pods are named by group (`head` or a pool), and by number where needed."""

    pods: Mapping[str, PodScript] = field(default_factory=dict)
    """Pod states by group, or by group and number (`main-0`); READY by default."""
    pod_creation_error: str | None = None
    invalid: str | None = None
    """The message with which KubeRay rejects the cluster."""
    missing: tuple[str, ...] = ()
    """Pods that do not exist, by group and number."""

    def pod(self, group: str, number: int) -> PodScript:
        """The state of one pod."""
        return self.pods.get(f"{group}-{number}", self.pods.get(group, READY))


HEALTHY = ClusterScript()


Json = dict[str, object]


@dataclass(frozen=True)
class RunMoment:
    """A submitted job at one moment."""

    status: str = "RUNNING"
    message: str = ""
    error_type: str | None = None
    exit_code: int | None = None
    run_state: Json | None = None
    log: str = ""


TrainerScript = Callable[[float, Json], RunMoment]
"""Maps the seconds since the submission, and the job's environment, to the job's state at that moment."""

LONG_AGO = "2026-01-31T12:00:00Z"


def run_state(
    environment: Mapping[str, object], phase: str, step: int, updated_at: str = LONG_AGO, **more: object
) -> Json:
    """A run state of a job with 4 steps, as the trainer writes it."""
    total_steps = 4
    state: Json = {
        "contractVersion": 1,
        "jobName": "job",
        "attempt": int(str(environment["RLJOB_ATTEMPT"])),
        "phase": phase,
        "progress": {
            "step": step,
            "totalSteps": total_steps,
            "rewardMean": step / total_steps,
            "tokensPerSecond": 100.0,
            "updatedAt": updated_at,
            "etaSeconds": 10 * (total_steps - step),
        },
        "writtenAt": updated_at,
    }
    if step >= 2:
        state["checkpoint"] = {
            "step": step - step % 2,
            "uri": f"file:///rljob/storage/checkpoints/step-{step - step % 2:06d}",
            "digest": "0" * 64,
            "savedAt": updated_at,
        }
    return state | more


def succeeding(seconds: float = 1.0) -> TrainerScript:
    """The trainer starts, trains for some seconds and completes."""

    def life(age: float, environment: Json) -> RunMoment:
        step = min(4, int(4 * age / seconds))
        reached = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age - step * seconds / 4)
        updated_at = reached.strftime("%Y-%m-%dT%H:%M:%SZ")
        if step < 4:
            return RunMoment(run_state=run_state(environment, "Running" if step else "Starting", step, updated_at))
        state = run_state(environment, "Complete", 4, updated_at, exportUri="file:///rljob/storage/run/export")
        return RunMoment("SUCCEEDED", "Job finished successfully.", run_state=state, exit_code=0)

    return life


def failing(exit_code: int, error: tuple[str, str] | None, log: str, after_seconds: float = 0.0) -> TrainerScript:
    """The trainer ends with an exit code. `error`: kind and message in its run state."""

    def life(age: float, environment: Json) -> RunMoment:
        if age < after_seconds:
            return RunMoment(run_state=run_state(environment, "Running", 1))
        state = None
        if error is not None:
            state = run_state(environment, "Failed", 1, error={"kind": error[0], "message": error[1]})
        message = f"Job entrypoint command failed with exit code {exit_code}, last available logs:\n{log}"
        return RunMoment("FAILED", message, "JOB_ENTRYPOINT_COMMAND_ERROR", exit_code, state, log)

    return life
