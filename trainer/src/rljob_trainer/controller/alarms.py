"""Raises and clears the alarms of a run. Neither an alarm nor an error in a rule stops the training.

When an alarm is raised and cleared: see docs/training-health.md.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from rljob_api.run_state import Alarm
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.controller.alarm_rules import WINDOW, Observation, Rule, rules_of
from rljob_trainer.errors import described
from rljob_trainer.observability.metrics import STEP_SECONDS, Metrics

log = logging.getLogger(__name__)

MAX_MESSAGE = 512
"""Maximum length of an alarm's message, as in its schema."""
MAX_STEPS_WITHOUT_NUMBER = 100
"""An alarm is cleared after this many steps without a value."""


class Alarms:
    """The alarms of one run. They never fail it: the first error is logged, and after that none are reported.
    `spec.training.model.dtype` must not be `Auto`."""

    def __init__(self, spec: RLJobSpec) -> None:
        self._states = [_AlarmState(rule) for rule in rules_of(spec)]
        self._has_failed = False

    @property
    def raised(self) -> tuple[Alarm, ...] | None:
        """The alarms that are raised now, most serious first; None after an error."""
        return None if self._has_failed else self._raised()

    def load(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Reads the steps of an earlier attempt from rows of `metrics.jsonl`, in order. Then logs the alarms that are
        still raised."""
        self._attempt(lambda: self._load(rows))

    def step_done(self, step: int, metrics: Metrics) -> tuple[Alarm, ...] | None:
        """Observes the metrics of a step, logs the alarms that this raises and clears, and returns `raised`."""
        self._attempt(lambda: self._step_done(step, metrics))
        return self.raised

    def _raised(self) -> tuple[Alarm, ...]:
        return tuple(state.alarm for state in self._states if state.alarm is not None)

    def _load(self, rows: Iterable[Mapping[str, object]]) -> None:
        for row in rows:
            step = row.get("step")
            # An evaluation and a save write further rows for a step.
            if isinstance(step, int) and STEP_SECONDS in row:
                self._observe(step, _metrics_of(row))
        for alarm in self._raised():
            log.warning("alarm %s since step %d: %s", alarm.reason, alarm.since_step, alarm.message)

    def _step_done(self, step: int, metrics: Metrics) -> None:
        before = {alarm.reason for alarm in self._raised()}
        self._observe(step, metrics)
        for alarm in self._raised():
            if alarm.reason not in before:
                log.warning("step %d: alarm %s: %s", step, alarm.reason, alarm.message)
        for reason in sorted(before - {alarm.reason for alarm in self._raised()}):
            log.info("step %d: alarm %s is cleared", step, reason)

    def _observe(self, step: int, metrics: Metrics) -> None:
        for state in self._states:
            state.add(step, state.rule.observe(metrics))

    def _attempt(self, observe: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            observe()
        except Exception as error:
            self._has_failed = True
            log.warning("alarms cannot be computed (%s); the training continues without them", described(error))


class _AlarmState:
    """One alarm and the steps that it looks at."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.alarm: Alarm | None = None
        self.is_unusual: deque[bool] = deque(maxlen=WINDOW)
        """One entry for each of the last steps that have a value, the newest last."""
        self.num_without = 0
        """Number of steps since the newest step that has a value."""

    def add(self, step: int, seen: Observation | None) -> None:
        """Counts a step, then raises, updates or clears the alarm."""
        self.num_without = 0 if seen is not None else self.num_without + 1
        if self.num_without >= MAX_STEPS_WITHOUT_NUMBER:
            self.alarm = None
            self.is_unusual.clear()
        if seen is None:
            return
        self.is_unusual.append(bool(seen.problem))
        num_unusual = sum(self.is_unusual)
        since = self.alarm.since_step if self.alarm is not None else step
        if seen.problem and (self.alarm is not None or num_unusual >= self.rule.min_unusual_steps):
            self.alarm = Alarm(
                reason=self.rule.reason.value,
                value=seen.value,
                message=seen.problem[:MAX_MESSAGE],
                since_step=since,
                step=step,
            )
        elif num_unusual < self.rule.min_unusual_steps / 2:
            self.alarm = None


def _metrics_of(row: Mapping[str, object]) -> dict[str, float]:
    """The metrics of a row. Values that are not finite are null there."""
    return {
        name: math.nan if value is None else float(value)
        for name, value in row.items()
        if value is None or isinstance(value, int | float)
    }
