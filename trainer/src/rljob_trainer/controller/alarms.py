"""Raises and clears the alarms of a run. Nothing is stopped by an alarm.

An alarm is raised if a number is unusual in n of the last `WINDOW` steps that have the number, and cleared when it is
unusual in fewer than n / 2 of them. So one odd step raises no alarm, and an alarm does not come and go with every step.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping

from rljob_api.run_state import Alarm
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.controller.alarm_rules import WINDOW, Observation, Rule, rules_of
from rljob_trainer.observability.metrics import STEP_SECONDS, Metrics

log = logging.getLogger(__name__)

MAX_MESSAGE = 512
"""Maximum length of an alarm's message, as in its schema."""


class Alarms:
    """The alarms of one run. `spec.training.model.dtype` must not be `Auto`."""

    def __init__(self, spec: RLJobSpec) -> None:
        self._watches = [_Watch(rule) for rule in rules_of(spec)]

    @property
    def raised(self) -> tuple[Alarm, ...]:
        """The alarms that are raised now, most serious first."""
        return tuple(watch.alarm for watch in self._watches if watch.alarm is not None)

    def load(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Reads the steps of an earlier attempt from rows of `metrics.jsonl`, in order. Then logs the alarms that are
        still raised."""
        for row in rows:
            step = row.get("step")
            # An evaluation and a save write further rows for a step.
            if isinstance(step, int) and STEP_SECONDS in row:
                self._observe(step, _metrics_of(row))
        for alarm in self.raised:
            log.warning("alarm %s since step %d: %s", alarm.reason, alarm.since_step, alarm.message)

    def step_done(self, step: int, metrics: Metrics) -> tuple[Alarm, ...]:
        """Observes the metrics of a step, logs the alarms that this raises and clears, and returns `raised`."""
        before = {alarm.reason for alarm in self.raised}
        self._observe(step, metrics)
        for alarm in self.raised:
            if alarm.reason not in before:
                log.warning("step %d: alarm %s: %s", step, alarm.reason, alarm.message)
        for reason in sorted(before - {alarm.reason for alarm in self.raised}):
            log.info("step %d: the alarm %s is cleared", step, reason)
        return self.raised

    def _observe(self, step: int, metrics: Metrics) -> None:
        for watch in self._watches:
            observation = watch.rule.observe(metrics)
            if observation is not None:
                watch.add(step, observation)


class _Watch:
    """One alarm and the steps that it looks at."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.alarm: Alarm | None = None
        self.is_unusual: deque[bool] = deque(maxlen=WINDOW)
        """For each of the last steps that have the number."""

    def add(self, step: int, seen: Observation) -> None:
        """Counts a step, then raises, updates or clears the alarm."""
        self.is_unusual.append(bool(seen.problem))
        num_unusual = sum(self.is_unusual)
        since = self.alarm.since_step if self.alarm is not None else step
        if seen.problem and (self.alarm is not None or num_unusual >= self.rule.num_steps):
            self.alarm = Alarm(
                reason=self.rule.reason.value,
                value=seen.value,
                message=seen.problem[:MAX_MESSAGE],
                since_step=since,
                step=step,
            )
        elif num_unusual < self.rule.num_steps / 2:
            self.alarm = None


def _metrics_of(row: Mapping[str, object]) -> dict[str, float]:
    """The metrics of a row. Values that are not finite are null there."""
    return {
        name: math.nan if value is None else float(value)
        for name, value in row.items()
        if value is None or isinstance(value, int | float)
    }
