"""Which checkpoints have the best values of the metric in `spec.checkpoint.keepBest`.

The controller records the value of each evaluation, and saves a checkpoint at a step with a new best value. Each
checkpoint contains the best values up to its own step, so a resumed run continues from them. A value counts only once
its checkpoint is complete: until then the checkpoints that were the best before are kept.
"""

from __future__ import annotations

import logging
import math

from rljob_api.base import WireModel
from rljob_api.run_state import BestCheckpoint
from rljob_api.scalars import ShortText
from rljob_api.v1alpha1.checkpoint import KeepBest, KeepBestMode
from rljob_trainer.observability.metrics import Metrics

log = logging.getLogger(__name__)


class BestState(WireModel):
    """What a checkpoint stores."""

    metric: ShortText
    mode: KeepBestMode
    checkpoints: tuple[BestCheckpoint, ...]
    """The best ones up to this checkpoint's step, best first."""


class BestCheckpoints:
    """The best values of a metric by the step of their checkpoint."""

    def __init__(self, spec: KeepBest) -> None:
        self.spec = spec
        self._values: dict[int, float] = {}
        """The best values up to the newest complete checkpoint, and all that were recorded after it."""

    def record(self, step: int, metrics: Metrics) -> bool:
        """Records the metric in the results of the evaluations after `step` steps. Returns whether a checkpoint of this
        step must be kept."""
        name = self.spec.metric
        evaluation = name.rpartition("/")[0]
        if not any(each.startswith(f"{evaluation}/") for each in metrics):
            return False  # This evaluation was not due.
        value = metrics.get(name, math.nan)
        if not math.isfinite(value):
            seen = "is not finite" if name in metrics else "was not reported"
            log.warning("step %d: %s %s, so its checkpoint cannot be the best one", step, name, seen)
            return False
        self._values[step] = value
        return step in self._best(step)

    def saved(self, step: int) -> None:
        """A checkpoint of this step is complete."""
        later = [each for each in self._values if each > step]
        self._values = {each: self._values[each] for each in (*self._best(step), *later)}

    def up_to(self, step: int) -> tuple[BestCheckpoint, ...]:
        """The best checkpoints up to a step, best first."""
        return tuple(BestCheckpoint(step=each, value=self._values[each]) for each in self._best(step))

    def state(self, step: int) -> BestState:
        """What the checkpoint of this step stores."""
        return BestState(metric=self.spec.metric, mode=self.spec.mode, checkpoints=self.up_to(step))

    def restore(self, state: BestState | None) -> None:
        """Continues from the state of the checkpoint that is loaded; None if it has none."""
        self._values = {}
        if state is None:
            return
        if (state.metric, state.mode) != (self.spec.metric, self.spec.mode):
            log.warning(
                "spec.checkpoint.keepBest: the checkpoint was saved with metric %s and mode %s (now: %s, %s); the best "
                "checkpoint is chosen anew from this step on",
                *(state.metric, state.mode, self.spec.metric, self.spec.mode),
            )
            return
        self._values = {each.step: each.value for each in state.checkpoints}

    def _best(self, step: int) -> list[int]:
        """The steps with the best values up to `step`, best first; of equal values the earlier one."""
        sign = -1 if self.spec.mode is KeepBestMode.MAX else 1
        known = [each for each in self._values if each <= step]
        return sorted(known, key=lambda each: (sign * self._values[each], each))[: self.spec.count]
