"""Reads and draws the learning curves of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rljob_testing.training import training_runs

Scores = Mapping[int, float]
"""Score by the number of completed steps."""
EVAL_GREEDY, EVAL_SAMPLED = "eval/heldout/greedy", "eval/heldout/mean_at_1"
"""The scores of the examples' evaluation."""


def scores(run: training_runs.RunFiles, name: str = EVAL_GREEDY) -> Scores:
    """A metric of a run's evaluations."""
    return {int(row["step"]): row[name] for row in run.metrics() if name in row}


def last(curve: Scores) -> float:
    """The score at the end."""
    return curve[max(curve)]


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return sum(values) / len(values)


def draw(axes: Axes, curves: Sequence[Scores], label: str, colour: str) -> None:
    """Draws the mean over the seeds, and each seed faintly."""
    for curve in curves:
        axes.plot(list(curve), list(curve.values()), color=colour, alpha=0.25, linewidth=1)
    steps = sorted(curves[0])
    axes.plot(steps, [mean([curve[step] for curve in curves]) for step in steps], color=colour, label=label)


def new_figure(num_panels: int, *titles: str) -> tuple[Figure, list[Axes]]:
    """A figure with panels for held-out scores, side by side."""
    figure = Figure(figsize=(7 * num_panels, 4))
    FigureCanvasAgg(figure)
    panels = [figure.add_subplot(1, num_panels, 1 + number) for number in range(num_panels)]
    for axes, title in zip(panels, titles, strict=True):
        axes.set_xlabel("step")
        axes.set_ylabel("held-out score, greedy")
        axes.set_ylim(0, 1)
        axes.set_title(title)
        axes.grid(alpha=0.3)
    return figure, panels


def save(figure: Figure, panels: Sequence[Axes], path: Path) -> None:
    """Adds legends and writes the picture."""
    for axes in panels:
        axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
