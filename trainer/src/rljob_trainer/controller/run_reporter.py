"""Keeps RunState and writes it to a file that a reader never sees half-written.

The file is how a run is watched from outside (the operator, `rljob run`); the manifest of a checkpoint, not this
file, decides where the next attempt resumes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from rljob_api.constants import CONTRACT_VERSION
from rljob_api.run_state import RunError, RunPhase, RunState
from rljob_api.v1alpha1.status import CheckpointStatus, Progress
from rljob_trainer.errors import TrainerError
from rljob_trainer.observability.log import printable
from rljob_trainer.observability.metrics import (
    EVAL_GREEDY,
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
"""At most so often is what takes long written."""
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
"""Phases of `PhaseTimer` in words."""

WallClock = Callable[[], float]
"""Seconds since 1970, such as `time.time`."""


class RunReporter:
    """The one writer of an attempt's RunState file. Every method writes it anew.

    All methods raise OSError when the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        job_name: str,
        attempt: int,
        total_steps: int,
        num_devices: int,
        wall_clock: WallClock,
        resumed: CheckpointStatus | None = None,
    ) -> None:
        """Writes the first state, `Starting` at step 0 or at that of the checkpoint to go on from."""
        self._path = path
        self._num_devices = num_devices
        self._wall_clock = wall_clock
        self._remaining = RemainingTime(total_steps)
        self._activity_told_at = -math.inf
        self._phase_activity = "starts"
        now = self._now()
        self._state = RunState(
            contract_version=CONTRACT_VERSION,
            job_name=job_name,
            attempt=attempt,
            phase=RunPhase.STARTING,
            progress=Progress(step=resumed.step if resumed else 0, total_steps=total_steps, updated_at=now),
            checkpoint=resumed,
            resumed_from_step=resumed.step if resumed else None,
            written_at=now,
        )
        self._write()

    @property
    def state(self) -> RunState:
        """The state last written."""
        return self._state

    def training_started(self, step: int) -> None:
        """Workers are ready; `step` steps are done already."""
        self._remaining.observe(step, self._wall_clock())
        self._change(phase=RunPhase.RUNNING, progress=self._progress(step=step))

    def step_done(self, step: int, metrics: Metrics) -> None:
        """`step` steps are done; what `metrics` does not say stays as it was."""
        self._remaining.observe(step, self._wall_clock())
        changes = self._scores(metrics)
        eta = self._remaining.seconds()
        if eta is not None:
            changes["eta_seconds"] = round(eta)
        self._change(progress=self._progress(step=step, **changes))

    def evaluated(self, metrics: Metrics) -> None:
        """An evaluation that belongs to no step of its own, such as the one before the first step."""
        self._change(progress=self._progress(**self._scores(metrics)))

    def doing(self, activity: str) -> None:
        """Something begins, or has got further, that may take long: whoever watches sees that the run is alive. While
        it trains this is written every `ACTIVITY_SECONDS` at most."""
        now = self._wall_clock()
        # Both ways: a clock that was set back must not silence it.
        is_recent = abs(now - self._activity_told_at) < ACTIVITY_SECONDS
        if is_recent and self._state.phase is not RunPhase.STARTING:
            return
        self._activity_told_at = now
        self._change(activity=activity)

    def in_phase(self, name: str) -> None:
        """As `doing`, of a phase of a step."""
        self._phase_activity = PHASE_ACTIVITIES.get(name, name)
        self.doing(self._phase_activity)

    def got_further(self, how: str) -> None:
        """As `doing`, of somebody who is in the midst of the newest phase."""
        self.doing(f"{self._phase_activity}; {printable(how, MAX_DETAIL_CHARS)}")

    def goes_on_from(self, checkpoint: CheckpointStatus) -> None:
        """This start begins with what a former one has saved; said again where that one proves to be damaged."""
        progress = self._progress(step=checkpoint.step)
        self._change(checkpoint=checkpoint, resumed_from_step=checkpoint.step, progress=progress)

    def checkpoint_saved(self, checkpoint: CheckpointStatus) -> None:
        """A checkpoint is complete."""
        self._change(checkpoint=checkpoint)

    def stopping(self) -> None:
        """The run was asked to stop and is saving."""
        self._change(phase=RunPhase.STOPPING)

    def stopped(self) -> None:
        """The run stopped on request."""
        self._change(phase=RunPhase.STOPPED)

    def complete(self, export_uri: str | None) -> None:
        """All steps are done and everything is saved."""
        self._change(phase=RunPhase.COMPLETE, export_uri=export_uri)

    def failed(self, error: BaseException) -> None:
        """The run ends with `error`."""
        kind = type(error).__name__[:MAX_ERROR_KIND_CHARS]
        worker = error.worker if isinstance(error, TrainerError) else None
        # A worker's own words, such as that a field is wrong, do not say where that was found.
        text = str(error) if worker is None or "worker rank" in str(error) else f"{error} ({worker})"
        message = printable(text, MAX_ERROR_CHARS, keep_newlines=True)[:MAX_ERROR_CHARS]
        place: dict[str, object] = {}
        if worker:
            names = {"role": worker.role, "pod": worker.pod, "node": worker.node}
            place = {name: printable(value, MAX_NAME_CHARS)[:MAX_NAME_CHARS] for name, value in names.items() if value}
            place["rank"] = worker.rank
        self._change(phase=RunPhase.FAILED, error=RunError.model_validate({"kind": kind, "message": message, **place}))

    def _scores(self, metrics: Metrics) -> dict[str, object]:
        scores = {
            "reward_mean": metrics.get(REWARD_MEAN),
            "eval_score": metrics.get(EVAL_GREEDY),
            "tokens_per_second": metrics[THROUGHPUT] * self._num_devices if THROUGHPUT in metrics else None,
        }
        return {name: value for name, value in scores.items() if value is not None and math.isfinite(value)}

    def _progress(self, **changes: object) -> Progress:
        known = {name: value for name, value in self._state.progress if value is not None}
        return Progress.model_validate({**known, **changes, "updated_at": self._now()})

    def _change(self, **changes: object) -> None:
        known = {name: value for name, value in self._state if value is not None and name != "activity"}
        said = {name: value for name, value in changes.items() if value is not None}
        self._state = RunState.model_validate({**known, **said, "written_at": self._now()})
        self._write()

    def _write(self) -> None:
        """Temporary file, fsync, rename: after a crash the file holds the old state or the new one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(self._path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(self._state.to_wire(), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)

    def _now(self) -> str:
        return datetime.fromtimestamp(self._wall_clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
