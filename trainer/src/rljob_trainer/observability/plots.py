"""Draws PNG plots of a run from its `metrics.jsonl`, and of the memory in its timelines:
`python -m rljob_trainer.observability.plots RUN_FOLDER`.

The run may still be active, so the last line of the file may be incomplete.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rljob_api.standard_streams import accept_all_characters
from rljob_trainer.observability import metrics
from rljob_trainer.observability.jsonl import read_rows
from rljob_trainer.observability.memory_plot import draw_memory
from rljob_trainer.observability.sinks import METRICS_FILE_NAME

PLOTS_FOLDER_NAME = "plots"
OVERVIEW_NAME = "overview.png"
SMOOTHING_WINDOW = 10
"""Steps in the moving average that is drawn over a noisy curve."""

EVALUATION_SCORE = re.compile(r"eval/(?P<evaluation>[^/]+)/(?P<score>greedy|(mean|pass|maj)_at_\d+)")
"""The scores of an evaluation, of all prompts."""

Points = list[tuple[int, float]]
"""(step, value), by step, one point per step."""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of a plot."""

    metric: str
    label: str
    smooth: bool = False
    """Whether a moving average is drawn, too, and the curve itself in a lighter color."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One PNG."""

    name: str
    title: str
    y_label: str
    lines: tuple[Line, ...]


PLOTS = (
    Plot("reward", "Training reward", "mean reward", (Line(metrics.REWARD_MEAN, "reward", smooth=True),)),
    Plot(
        "kl",
        "KL divergence",
        "nats per token",
        (
            Line(metrics.KL_LOSS, "to the reference"),
            Line(metrics.TEACHER_KL, "to the teacher"),
            Line(metrics.PPO_KL, "to the sampling policy"),
        ),
    ),
    Plot("entropy", "Entropy of the policy", "nats per token", (Line(metrics.ENTROPY, "entropy"),)),
    Plot(
        "response_length",
        "Response length",
        "tokens",
        (Line(metrics.RESPONSE_LENGTH_MEAN, "mean"), Line(metrics.RESPONSE_LENGTH_MAX, "longest")),
    ),
)


def read_curves(run_folder: Path) -> dict[str, Points]:
    """Returns the values of every metric of the run, by name. If a step has several values, the last one counts. Values
    that are not finite numbers are skipped.

    Raises:
        FileNotFoundError: the folder has no metrics.
        ValueError: a line is damaged, and is not an incomplete last line.
    """
    path = run_folder / METRICS_FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give the folder of a run, such as runs/<name>")
    by_name: dict[str, dict[int, float]] = {}
    for row in read_rows(path):
        step = row.get("step")
        if not isinstance(step, int):
            continue
        for name, value in row.items():
            if name not in ("step", "wall_time") and isinstance(value, int | float) and math.isfinite(value):
                by_name.setdefault(name, {})[step] = float(value)
    return {name: sorted(points.items()) for name, points in by_name.items()}


def moving_average(points: Points, window: int) -> Points:
    """Returns the mean of the last `window` values at each point; of fewer values at the beginning."""
    averaged = []
    for index, (step, _) in enumerate(points):
        newest = [value for _, value in points[max(0, index + 1 - window) : index + 1]]
        averaged.append((step, math.fsum(newest) / len(newest)))
    return averaged


def draw_plots(run_folder: Path) -> list[Path]:
    """Draws one PNG for each of `PLOTS` that has data, an overview of them, and one PNG for each timeline that has
    memory counters. Returns the files, overview first. Draws nothing if no plot has data.

    Raises:
        FileNotFoundError: the folder has no metrics.
        ValueError: the metrics or a timeline are damaged.
        OSError: a file cannot be written.
    """
    curves = read_curves(run_folder)
    reward, *others = PLOTS
    plots = [reward, *_evaluation_plots(curves), *others]
    shown = [plot for plot in plots if any(line.metric in curves for line in plot.lines)]
    if not shown:
        return []
    folder = run_folder / PLOTS_FOLDER_NAME
    folder.mkdir(exist_ok=True)
    files = [_save(run_folder.name, shown, curves, folder / OVERVIEW_NAME)]
    files += [_save(run_folder.name, [plot], curves, folder / f"{plot.name}.png") for plot in shown]
    return files + draw_memory(run_folder, folder)


def _evaluation_plots(names: Iterable[str]) -> list[Plot]:
    """One plot for each evaluation, with its scores of all prompts."""
    lines: dict[str, list[Line]] = {}
    for metric in names:
        match = EVALUATION_SCORE.fullmatch(metric)
        if match:
            lines.setdefault(match["evaluation"], []).append(Line(metric, match["score"].replace("_at_", "@")))
    return [
        Plot(f"evaluation_{name}", f"Held-out score, {name}", "mean score", tuple(of_evaluation))
        for name, of_evaluation in lines.items()
    ]


def _save(run_name: str, plots: Sequence[Plot], curves: dict[str, Points], path: Path) -> Path:
    num_columns = min(3, len(plots))
    num_rows = math.ceil(len(plots) / num_columns)
    figure = Figure(figsize=(5.2 * num_columns, 3.6 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(run_name)
    for index, plot in enumerate(plots, start=1):
        _draw(figure.add_subplot(num_rows, num_columns, index), plot, curves)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=110)
    temporary.replace(path)
    return path


def _draw(axes: Axes, plot: Plot, curves: dict[str, Points]) -> None:
    for index, line in enumerate(plot.lines):
        points = curves.get(line.metric, [])
        if not points:
            continue
        color = f"C{index}"
        steps = [step for step, _ in points]
        marker = "o" if len(points) <= 30 else ""
        values = [value for _, value in points]
        opacity = 0.35 if line.smooth else 1.0
        axes.plot(steps, values, color=color, marker=marker, markersize=3.5, alpha=opacity, label=line.label)
        if line.smooth:
            averaged = [value for _, value in moving_average(points, SMOOTHING_WINDOW)]
            axes.plot(steps, averaged, color=color, label=f"{line.label}, mean of {SMOOTHING_WINDOW} steps")
    axes.set_title(plot.title)
    axes.set_xlabel("training step")
    axes.set_ylabel(plot.y_label)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")


def main(arguments: Sequence[str]) -> int:
    """Draws the plots of the run folder in `arguments`, and prints their paths. Returns the exit code: 1 if there is
    nothing to draw yet, 2 after an error."""
    accept_all_characters()
    if len(arguments) != 1:
        print("usage: python -m rljob_trainer.observability.plots RUN_FOLDER", file=sys.stderr)
        return 2
    try:
        files = draw_plots(Path(arguments[0]))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for file in files:
        print(file)
    if not files:
        print(f"{arguments[0]}: no metrics to draw yet; wait for the first step", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
