"""What a run leaves for people: metrics, samples, plots, and the lines on the terminal."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from rljob_api.v1alpha1.training import Logger
from rljob_trainer.observability.metrics import EVAL_GREEDY, EVAL_SAMPLED, Metrics
from rljob_trainer.observability.plots import draw_plots
from rljob_trainer.observability.progress import LastingConsole, ProgressDisplay
from rljob_trainer.observability.samples import Sample, SampleLog, sample_table
from rljob_trainer.observability.sinks import JsonlSink, MetricLog, Sink, TensorBoardSink

log = logging.getLogger(__name__)

NUM_SAMPLES_SHOWN = 4


class RunOutput:
    """Writes into the run folder and to the terminal."""

    def __init__(
        self,
        run_folder: Path,
        loggers: Sequence[Logger],
        resumed_from_step: int | None,
        num_steps: int,
        num_devices: int,
    ) -> None:
        self.run_folder = run_folder
        sinks: list[Sink] = [JsonlSink(run_folder, resumed_from_step, time.time)]
        if Logger.TENSORBOARD in loggers:
            sinks.append(TensorBoardSink(run_folder, resumed_from_step, time.time))
        self.console = LastingConsole(quiet=Logger.CONSOLE not in loggers)
        self.progress = ProgressDisplay(self.console, num_steps, num_devices, time.monotonic)
        self.files = MetricLog(sinks)
        self.metrics = MetricLog([*sinks, self.progress])
        self.samples = SampleLog(run_folder, resumed_from_step)
        self.scores: dict[int, Metrics] = {}

    def start(self, step: int) -> None:
        """Begins the progress display at `step` steps done."""
        self.progress.start(step)

    def step_done(self, step: int, metrics: Metrics, samples: Sequence[Sample]) -> None:
        """The newest step."""
        self.metrics.write(step, metrics)
        self.samples.write(samples)

    def saved(self, step: int, metrics: Metrics) -> None:
        """What a save took that ended after the newest step's row was written: a row of its own, in the files only."""
        self.files.write(step, metrics)

    def evaluated(self, step: int, metrics: Metrics, samples: Sequence[Sample]) -> None:
        """An evaluation after `step` steps; a few of its samples are shown."""
        self.metrics.write(step, metrics)
        self.samples.write(samples)
        self.scores[step] = metrics
        self.progress.show(sample_table(f"held-out prompts after step {step}", samples[:NUM_SAMPLES_SHOWN]))

    def close(self) -> None:
        """Closes files and draws the plots. Never raises: it must not hide how the run ended."""
        try:
            self.metrics.close()
            self.samples.close()
            draw_plots(self.run_folder)
        except Exception as error:
            again = shlex.join(["rljob", "plot", str(self.run_folder)])
            log.warning("metrics or plots are incomplete (%s); draw them again with `%s`", error, again)

    def summary(self) -> str | None:
        """Held-out scores before and after, when there are two evaluations."""
        if len(self.scores) < 2:
            return None
        first, last = self.scores[min(self.scores)], self.scores[max(self.scores)]
        labels = {EVAL_GREEDY: "greedy", EVAL_SAMPLED: "sampled"}
        found = {label: (first[name], last[name]) for name, label in labels.items() if name in first and name in last}
        # Weighted sums are no shares of anything.
        are_shares = all(0 <= score <= 1 for scores in found.values() for score in scores)
        form = ".1%" if are_shares else ".3f"
        parts = [f"{label} {before:{form}} -> {after:{form}}" for label, (before, after) in found.items()]
        return f"held-out score, step {min(self.scores)} -> {max(self.scores)}: {', '.join(parts)}"
