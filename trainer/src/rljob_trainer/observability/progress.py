"""Shows progress to people: a bar on a terminal; without a terminal (CI, `kubectl logs`) one plain line for each step
and each evaluation."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from rljob_api.standard_streams import discard_output
from rljob_api.v1alpha1.dataset import EvaluationScores
from rljob_trainer.observability.metrics import (
    EXCLUDED_FRACTION,
    REWARD_MEAN,
    TEACHER_KL,
    THROUGHPUT,
    TIMING_PREFIX,
    Metrics,
)
from rljob_trainer.observability.timing import Clock, RemainingTime

log = logging.getLogger(__name__)

_STEP_TIMING = TIMING_PREFIX + "step"
_PARTS_OF_ROLLOUT = (TIMING_PREFIX + "generate", TIMING_PREFIX + "weight_sync")
"""Not shown, because they are contained in another phase."""
NUM_PHASES_SHOWN = 3
"""The number of phases whose time is shown: those that took the longest."""


class LastingConsole(Console):
    """A console for a standard output that may become impossible to write: a closed pipe (`rljob run job.yaml | head`)
    or terminal, or a file on a full disk. Then the run continues without this output."""

    def on_broken_pipe(self) -> None:
        """Stops the output. The method of rich that this one replaces would end the program."""
        self.quiet = True
        discard_output(sys.__stdout__ or sys.stdout)
        log.warning(
            "standard output cannot be written; the run continues, see its metrics and samples in the run folder"
        )

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()


class ProgressDisplay:
    """A sink that shows the newest step. Reward and evaluation scores stay visible until there are newer ones."""

    def __init__(
        self,
        console: Console,
        total_steps: int,
        num_devices: int,
        clock: Clock,
        evaluations: Sequence[EvaluationScores] = (),
    ) -> None:
        self._console = console
        self._total_steps = total_steps
        self._num_devices = num_devices
        self._clock = clock
        self._labels = {REWARD_MEAN: "reward", TEACHER_KL: "teacher KL"}
        for each in evaluations:
            main, *others = each.labels.items()
            self._labels[main[0]] = "eval" if len(evaluations) == 1 else f"eval {each.name}"
            # With several evaluations, the line has room for one score of each.
            if len(evaluations) == 1:
                self._labels |= {name: f"eval {label}" for name, label in others}
        self._remaining = RemainingTime(total_steps)
        self._newest: dict[str, float] = {}
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def start(self, step: int) -> None:
        """Starts the display at `step` completed steps: 0, or the step that the run resumes from."""
        self._remaining.observe(step, self._clock())
        if not self._console.is_terminal:
            return
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        # Log lines are printed above the bar, unless standard error is not the terminal.
        self._bar = RichProgress(*columns, console=self._console, redirect_stderr=sys.stderr.isatty())
        self._task = self._bar.add_task("training", total=self._total_steps, completed=step, note="")
        self._bar.start()

    def write(self, step: int, metrics: Metrics) -> None:
        """Shows that `step` steps are done."""
        self._newest.update(metrics)
        if REWARD_MEAN in metrics or TEACHER_KL in metrics:
            self._remaining.observe(step, self._clock())
        note = ", ".join(self._summary(metrics))
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, note=note)
        else:
            self._console.print(Text(f"step {step}/{self._total_steps}: {note}"), soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """Prints a table or a text above the bar; markup in a text is not interpreted."""
        self._console.print(Text(renderable) if isinstance(renderable, str) else renderable)

    def close(self) -> None:
        """Stops updating the bar, which stays visible. Other programs can use the terminal again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _summary(self, metrics: Metrics) -> Sequence[str]:
        parts = []
        for name, label in self._labels.items():
            if name in self._newest:
                parts.append(f"{label} {self._newest[name]:.3f}")
        if metrics.get(EXCLUDED_FRACTION):
            parts.append(f"{metrics[EXCLUDED_FRACTION]:.0%} of the responses excluded")
        if THROUGHPUT in metrics:
            parts.append(f"{metrics[THROUGHPUT] * self._num_devices:,.0f} tokens/s")
        eta = self._remaining.seconds()
        if eta is not None:
            parts.append(f"ETA {duration(eta)}")
        parts.extend(_timing(metrics))
        return parts


def duration(seconds: float) -> str:
    """Formats a duration: `45 s`, `3 min 05 s` or `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _timing(metrics: Metrics) -> list[str]:
    if _STEP_TIMING not in metrics:
        return []
    phases = [
        (seconds, name.removeprefix(TIMING_PREFIX))
        for name, seconds in metrics.items()
        if name.startswith(TIMING_PREFIX) and name not in (_STEP_TIMING, *_PARTS_OF_ROLLOUT)
    ]
    longest = [f"{name} {seconds:.2f}" for seconds, name in sorted(phases, reverse=True)[:NUM_PHASES_SHOWN]]
    return [f"{metrics[_STEP_TIMING]:.2f} s" + (f" ({', '.join(longest)})" if longest else "")]
