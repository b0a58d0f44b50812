"""Which checkpoints have the best values of the metric in `spec.checkpoint.keepBest`.

The controller records the value of each evaluation, and saves a checkpoint at a step with a new best value. Each
checkpoint contains the best values up to its own step, so a resumed run continues from them. A value counts only once
its checkpoint is complete: until then the checkpoints that were the best before are kept.

Values are compared only if they were measured in the same way (`evaluation_digest`). A value does not count if more
than `maxFailureRate` of the responses have no score: the mean of a few responses, after an outage of a judge, cannot be
compared with other values.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Collection, Mapping

from rljob_api.base import WireModel
from rljob_api.run_state import BestCheckpoint
from rljob_api.scalars import ShortText
from rljob_api.v1alpha1.checkpoint import KeepBest, KeepBestMode
from rljob_api.v1alpha1.dataset import EVALUATION_METRICS
from rljob_api.v1alpha1.environment_rules import rewards_of
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.training import Training
from rljob_trainer.observability.metrics import Metrics

log = logging.getLogger(__name__)

IRRELEVANT_OF_EVALUATION = {"every_steps", "at_start"}
IRRELEVANT_OF_REWARD: Mapping[str, bool | set[str]] = {
    "num_processes": True,
    "timeout_seconds": True,
    "function": {"batch_size", "max_concurrency"},
    "judge": {"key_variable", "max_concurrency", "requests_per_minute", "tokens_per_minute", "prices"},
    "remote": {"key_variable", "batch_size"},
}
"""Fields that do not change what an evaluation measures."""


class BestState(WireModel):
    """The best checkpoints, as a checkpoint stores them."""

    metric: ShortText
    mode: KeepBestMode
    checkpoints: tuple[BestCheckpoint, ...]
    """The best ones up to this checkpoint's step, best first."""
    evaluation_digest: str | None = None
    """See the function of this name; None in a checkpoint of an earlier version."""


class BestCheckpoints:
    """The best values of a metric by the step of their checkpoint."""

    def __init__(self, spec: KeepBest, max_failure_rate: float = 1.0, evaluation_digest: str | None = None) -> None:
        """`max_failure_rate`: the largest fraction of responses without a score."""
        self.spec = spec
        self.max_failure_rate = max_failure_rate
        self.evaluation_digest = evaluation_digest
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
        excluded = metrics.get(f"{evaluation}/excluded_fraction", 0.0)
        if excluded > self.max_failure_rate:
            log.warning(
                "step %d: %.1f %% of the responses of the evaluation have no score, which is more than "
                "training.maxFailureRate (%g), so its checkpoint cannot be the best one",
                *(step, 100 * excluded, self.max_failure_rate),
            )
            return False
        self._values[step] = value
        return step in self._best(step)

    def saved(self, step: int) -> None:
        """Records that the checkpoint of this step is complete."""
        later = [each for each in self._values if each > step]
        self._values = {each: self._values[each] for each in (*self._best(step), *later)}

    def up_to(self, step: int) -> tuple[BestCheckpoint, ...]:
        """The best checkpoints up to a step, best first."""
        return tuple(BestCheckpoint(step=each, value=self._values[each]) for each in self._best(step))

    def state(self, step: int) -> BestState:
        """What the checkpoint of this step stores."""
        return BestState(
            metric=self.spec.metric,
            mode=self.spec.mode,
            checkpoints=self.up_to(step),
            evaluation_digest=self.evaluation_digest,
        )

    def restore(self, state: BestState | None, steps: Collection[int]) -> None:
        """Continues from the state in the checkpoint that is loaded; None if it has none. `steps`: the steps of the
        checkpoints that exist. If a run resumes from an older checkpoint, because newer ones are damaged, a best
        checkpoint in its state may have been removed already."""
        self._values = {}
        if state is None:
            return
        if (state.metric, state.mode) != (self.spec.metric, self.spec.mode):
            log.warning(
                "spec.checkpoint.keepBest: the checkpoint was saved with metric %s and mode %s (now: %s, %s); the best "
                "checkpoint is chosen only among later steps",
                *(state.metric, state.mode, self.spec.metric, self.spec.mode),
            )
            return
        if state.evaluation_digest not in (None, self.evaluation_digest):
            log.warning(
                "spec.checkpoint.keepBest: the evaluation of %s, or a reward that scores it, has changed since the "
                "checkpoint was saved; the best checkpoint is chosen only among later steps",
                self.spec.metric,
            )
            return
        if removed := [each for each in state.checkpoints if each.step not in steps]:
            log.warning(
                "spec.checkpoint.keepBest: the best checkpoint of step %d no longer exists, so it is left out",
                removed[0].step,
            )
        self._values = {each.step: each.value for each in state.checkpoints if each.step in steps}

    def _best(self, step: int) -> list[int]:
        """The steps with the best values up to `step`, best first; of equal values the earlier one."""
        sign = -1 if self.spec.mode is KeepBestMode.MAX else 1
        known = [each for each in self._values if each <= step]
        return sorted(known, key=lambda each: (sign * self._values[each], each))[: self.spec.count]


def best_checkpoints_of(spec: RLJobSpec) -> BestCheckpoints | None:
    """Returns an empty record for the job's `keepBest`; None without it."""
    best = spec.checkpoint.keep_best
    if best is None:
        return None
    return BestCheckpoints(best, spec.training.max_failure_rate, evaluation_digest(best.metric, spec.training))


def evaluation_digest(metric: str, training: Training) -> str:
    """Returns a digest of all settings that change what the evaluation of a metric measures: its own, and those of its
    rewards. Fields with their defaults do not count, so that a new version of rljob may add fields."""
    [evaluation] = [each for each in training.evaluations if metric.startswith(f"{EVALUATION_METRICS}{each.name}/")]
    own = evaluation.model_dump(mode="json", exclude_defaults=True, exclude=IRRELEVANT_OF_EVALUATION)
    own["max_new_tokens"] = evaluation.max_new_tokens or training.rollout.max_new_tokens
    rewards = [
        each.model_dump(mode="json", exclude_defaults=True, exclude=IRRELEVANT_OF_REWARD)
        for each in rewards_of(evaluation, training)
    ]
    return hashlib.sha256(json.dumps([own, rewards], sort_keys=True).encode()).hexdigest()
