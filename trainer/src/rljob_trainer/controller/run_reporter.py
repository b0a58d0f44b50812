"""Writes the RunState file, atomically: a reader never sees an incomplete file.

The operator and `rljob run` watch a run through this file. To resume, the next attempt reads the manifests of the
checkpoints, not this file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from rljob_api.constants import CONTRACT_VERSION, ErrorCause
from rljob_api.run_state import Alarm, BestCheckpoint, RunError, RunPhase, RunState
from rljob_api.v1alpha1.status import CheckpointStatus, Progress
from rljob_trainer.errors import TrainerError, WorkerDiedError, WorkerError
from rljob_trainer.observability.log import printable
from rljob_trainer.observability.metrics import (
    REWARD_MEAN,
    THROUGHPUT,
    Metrics,
)
from rljob_trainer.observability.timing import RemainingTime

MAX_ERROR_KIND_CHARS = 64
MAX_ERROR_CHARS = 4000
MAX_NAME_CHARS = 253
MAX_DETAIL_CHARS = 150

ACTIVITY_SECONDS = 10.0
"""Minimum time between two activity updates during training."""
PHASE_ACTIVITIES: Mapping[str, str] = MappingProxyType(
    {
        "rollout": "generates responses",
        "reward": "waits for scores",
        "old_logprob": "computes log-probabilities",
        "ref": "computes log-probabilities of the reference",
        "values": "computes values",
        "update_critic": "updates the critic",
        "update_actor": "updates the actor",
        "eval": "evaluates",
        "save": "copies a checkpoint",
        "save_wait": "waits for a checkpoint to be written",
    }
)
"""The activity text for each phase of `PhaseTimer`."""

WallClock = Callable[[], float]
"""Seconds since 1970, such as `time.time`."""


class RunReporter:
    """The only writer of an attempt's RunState file. The methods rewrite the file, and raise OSError if this fails."""

    def __init__(
        self,
        path: Path,
        job_name: str,
        attempt: int,
        total_steps: int,
        num_devices: int,
        wall_clock: WallClock,
    ) -> None:
        """Writes the first state: `Starting`, at step 0."""
        self._path = path
        self._num_devices = num_devices
        self._wall_clock = wall_clock
        self._remaining = RemainingTime(total_steps)
        self._activity_written_at = -math.inf
        self._phase_activity = "starts"
        now = self._now()
        self._state = RunState(
            contract_version=CONTRACT_VERSION,
            job_name=job_name,
            attempt=attempt,
            phase=RunPhase.STARTING,
            progress=Progress(step=0, total_steps=total_steps, updated_at=now),
            written_at=now,
        )
        self._write()

    @property
    def state(self) -> RunState:
        """The state that was written last."""
        return self._state

    def training_started(self, step: int, alarms: Sequence[Alarm] | None) -> None:
        """Reports that the workers are ready and `step` steps are already done, and the alarms of these steps that are
        still raised; None if they are not known."""
        self._remaining.observe(step, self._wall_clock())
        self._change(phase=RunPhase.RUNNING, progress=self._progress(step=step), alarms=_as_tuple(alarms))

    def step_done(self, step: int, metrics: Metrics, alarms: Sequence[Alarm] | None) -> None:
        """Reports that `step` steps are done, and the alarms that are raised now; None if they are not known. Values
        that are not in `metrics` stay unchanged."""
        self._remaining.observe(step, self._wall_clock())
        changes = self._scores(metrics)
        eta = self._remaining.seconds()
        if eta is not None:
            changes["eta_seconds"] = round(eta)
        self._change(progress=self._progress(step=step, **changes), alarms=_as_tuple(alarms))

    def evaluated(self, score: float | None) -> None:
        """Reports the main score of the first evaluation, if there is one; the number of steps stays unchanged."""
        changes = {} if score is None or not math.isfinite(score) else {"eval_score": score}
        self._change(progress=self._progress(**changes))

    def doing(self, activity: str) -> None:
        """Reports that a slow activity has started or made progress. This shows that the run is alive. Once training
        has started, the file is rewritten for this at most every `ACTIVITY_SECONDS`."""
        now = self._wall_clock()
        # abs(), because a clock that was set back must not suppress updates.
        is_recent = abs(now - self._activity_written_at) < ACTIVITY_SECONDS
        if is_recent and self._state.phase is not RunPhase.STARTING:
            return
        self._activity_written_at = now
        self._change(activity=activity)

    def in_phase(self, name: str) -> None:
        """Like `doing`, for the start of a phase of a step."""
        self._phase_activity = PHASE_ACTIVITIES.get(name, name)
        self.doing(self._phase_activity)

    def report_progress(self, how: str) -> None:
        """Like `doing`, for progress within the current phase."""
        self.doing(f"{self._phase_activity}; {printable(how, MAX_DETAIL_CHARS)}")

    def report_resume(self, checkpoint: CheckpointStatus, best: BestCheckpoint | None = None) -> None:
        """Reports the checkpoint that this start resumes from. Called again with an older checkpoint if the first one
        is damaged."""
        progress = self._progress(step=checkpoint.step)
        self._change(checkpoint=checkpoint, best=best, resumed_from_step=checkpoint.step, progress=progress)

    def checkpoint_saved(self, checkpoint: CheckpointStatus, best: BestCheckpoint | None = None) -> None:
        """Reports that a checkpoint is complete. `best`: the best one, which may be an earlier one."""
        self._change(checkpoint=checkpoint, best=best)

    def stopping(self) -> None:
        """Reports that a stop was requested and the run is saving."""
        self._change(phase=RunPhase.STOPPING)

    def stopped(self) -> None:
        """Reports that the run has stopped as requested."""
        self._change(phase=RunPhase.STOPPED)

    def complete(self, export_uri: str | None) -> None:
        """Reports that all steps are done and everything is saved."""
        self._change(phase=RunPhase.COMPLETE, export_uri=export_uri)

    def failed(self, error: BaseException) -> None:
        """Reports that the run ends with `error`."""
        kind = type(error).__name__[:MAX_ERROR_KIND_CHARS]
        worker = error.worker if isinstance(error, TrainerError) else None
        # The message of a WorkerError or WorkerDiedError names the worker. A worker raises all other errors itself, and
        # their messages do not name it.
        is_named = worker is None or isinstance(error, WorkerError | WorkerDiedError)
        text = str(error) if is_named else f"{error} ({worker})"
        message = printable(text, MAX_ERROR_CHARS, keep_newlines=True)[:MAX_ERROR_CHARS]
        details: dict[str, object] = {}
        if worker:
            names = {"role": worker.role, "pod": worker.pod, "node": worker.node}
            details = {key: printable(value, MAX_NAME_CHARS)[:MAX_NAME_CHARS] for key, value in names.items() if value}
            details["rank"] = worker.rank
        if cause := _known_cause(error):
            details["cause"] = cause.value
        run_error = RunError.model_validate({"kind": kind, "message": message, **details})
        self._change(phase=RunPhase.FAILED, error=run_error)

    def _scores(self, metrics: Metrics) -> dict[str, object]:
        scores = {
            "reward_mean": metrics.get(REWARD_MEAN),
            "tokens_per_second": metrics[THROUGHPUT] * self._num_devices if THROUGHPUT in metrics else None,
        }
        return {name: value for name, value in scores.items() if value is not None and math.isfinite(value)}

    def _progress(self, **changes: object) -> Progress:
        known = {name: value for name, value in self._state.progress if value is not None}
        return Progress.model_validate({**known, **changes, "updated_at": self._now()})

    def _change(self, **changes: object) -> None:
        """Changes fields of the state; None unsets a field. An activity lasts until the next change."""
        fields = {**dict(self._state), "activity": None, **changes, "written_at": self._now()}
        self._state = RunState.model_validate({name: value for name, value in fields.items() if value is not None})
        self._write()

    def _write(self) -> None:
        """Writes a temporary file, calls fsync, and renames it, so that after a crash the file has the old or the new
        state."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(self._path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(self._state.to_wire(), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)

    def _now(self) -> str:
        return datetime.fromtimestamp(self._wall_clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _known_cause(error: BaseException) -> ErrorCause | None:
    if isinstance(error, TrainerError):
        return error.known_cause
    return ErrorCause.HOST_MEMORY if isinstance(error, MemoryError) else None


def _as_tuple(alarms: Sequence[Alarm] | None) -> tuple[Alarm, ...] | None:
    return None if alarms is None else tuple(alarms)
