"""The output of a run that users read: metrics, samples, plots, and the lines on the terminal."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from rljob_api.v1alpha1.dataset import Evaluation, EvaluationScores, scores_of
from rljob_api.v1alpha1.training import Logger
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.observability.plots import draw_plots
from rljob_trainer.observability.progress import LastingConsole, ProgressDisplay
from rljob_trainer.observability.samples import Sample, SampleLog, sample_table
from rljob_trainer.observability.sinks import JsonlSink, MetricLog, Sink, TensorBoardSink
from rljob_trainer.observability.timeline import newest_timeline_file
from rljob_trainer.observability.token_files import all_token_files, remove_newer
from rljob_trainer.trackers.trackers import Trackers

log = logging.getLogger(__name__)

NUM_SAMPLES_SHOWN = 4


class RunOutput:
    """Writes into the run folder, to the terminal, and to the trackers."""

    def __init__(
        self,
        run_folder: Path,
        loggers: Sequence[Logger],
        resumed_from_step: int | None,
        num_steps: int,
        num_devices: int,
        trackers: Trackers,
        evaluations: Sequence[Evaluation] = (),
    ) -> None:
        self.run_folder = run_folder
        for path in (*all_token_files(run_folder), newest_timeline_file(run_folder)):
            remove_newer(path, resumed_from_step)
        sinks: list[Sink] = [JsonlSink(run_folder, resumed_from_step, time.time)]
        if Logger.TENSORBOARD in loggers:
            sinks.append(TensorBoardSink(run_folder, resumed_from_step, time.time))
        self.console = LastingConsole(quiet=Logger.CONSOLE not in loggers)
        self.scores = scores_of(evaluations)
        self.progress = ProgressDisplay(self.console, num_steps, num_devices, time.monotonic, self.scores)
        self.files = MetricLog(sinks)  # Without the terminal.
        self.metrics = MetricLog([*sinks, self.progress])
        self.trackers = trackers
        self.samples = SampleLog(run_folder, resumed_from_step)
        self.evaluations: dict[int, Metrics] = {}
        """The metrics of evaluations by the number of steps before them."""

    def start(self, step: int) -> None:
        """Starts the progress display; `step` steps are already done."""
        self.progress.start(step)

    def step_done(self, step: int, metrics: Metrics, samples: Sequence[Sample]) -> None:
        """Writes the metrics and samples of the newest step."""
        self.metrics.write(step, metrics)
        self.trackers.write(step, metrics)
        self.samples.write(samples)

    def saved(self, step: int, metrics: Metrics) -> None:
        """Writes the time of a save that finished after the newest step's row was written, as a separate row and only
        to the files."""
        self.files.write(step, metrics)
        self.trackers.write(step, metrics)

    def evaluated(self, step: int, metrics: Metrics, samples: Sequence[Sequence[Sample]]) -> None:
        """Writes the results of the evaluations after `step` steps, and shows a few samples on the terminal.
        `samples`: those of each evaluation."""
        self.metrics.write(step, metrics)
        self.trackers.write(step, metrics)
        self.evaluations[step] = metrics
        for of_evaluation in samples:
            self.samples.write(of_evaluation)
            self.trackers.write_samples(step, of_evaluation)
            name = f"{of_evaluation[0].evaluation}: " if len(self.scores) > 1 else ""
            title = f"{name}held-out prompts after step {step}"
            self.progress.show(sample_table(title, of_evaluation[:NUM_SAMPLES_SHOWN]))

    def close(self) -> None:
        """Closes the files and draws the plots. Never raises, because an error here must not hide why the run ended."""
        try:
            self.metrics.close()
            self.samples.close()
            draw_plots(self.run_folder)
        except Exception as error:
            again = shlex.join(["rljob", "plot", str(self.run_folder)])
            log.warning("metrics or plots are incomplete (%s); draw the plots again with `%s`", error, again)

    def summary(self) -> list[str]:
        """Returns one line for each evaluation that was done at least twice: its scores of the first and last time."""
        return [line for each in self.scores if (line := self._summary(each))]

    def _summary(self, scores: EvaluationScores) -> str | None:
        steps = [step for step, metrics in self.evaluations.items() if scores.labels.keys() & metrics.keys()]
        if len(steps) < 2:
            return None
        first, last = self.evaluations[min(steps)], self.evaluations[max(steps)]
        found = {
            label: (first[name], last[name]) for name, label in scores.labels.items() if name in first and name in last
        }
        # Percentages are only meaningful for scores from 0 to 1. Weighted sums may be outside of this range.
        are_shares = all(0 <= score <= 1 for values in found.values() for score in values)
        form = ".1%" if are_shares else ".3f"
        parts = [f"{label} {before:{form}} -> {after:{form}}" for label, (before, after) in found.items()]
        what = "held-out score" if len(self.scores) == 1 else f"held-out score {scores.name}"
        return f"{what}, step {min(steps)} -> {max(steps)}: {', '.join(parts)}"
