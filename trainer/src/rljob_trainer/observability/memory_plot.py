"""Draws a step's memory from its timeline: the bytes of each owner at each boundary, and the peaks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rljob_trainer.observability.timeline import MEMORY_PEAK_TRACK, MEMORY_TRACK, TIMELINES_FOLDER_NAME


@dataclass(frozen=True)
class MemoryStep:
    """The memory of one process in one step. `owners`: by owner, the MiB at each boundary. `peaks`: the peak in MiB
    between each boundary and the one before."""

    process: str
    boundaries: Sequence[str]
    owners: dict[str, list[float]]
    peaks: list[float]


def draw_memory(run_folder: Path, folder: Path) -> list[Path]:
    """Draws one PNG for each timeline of the run that has memory counters. Raises OSError, and ValueError for a
    file that is not JSON."""
    files = []
    for timeline in sorted((run_folder / TIMELINES_FOLDER_NAME).glob("step-*.json")):
        step = read_memory(timeline)
        if step is not None:
            files.append(_save(f"{run_folder.name}, {timeline.stem}", step, folder / f"memory-{timeline.stem}.png"))
    return files


def read_memory(timeline: Path) -> MemoryStep | None:
    """Reads the memory of the first process that has memory counters in the file; None if no process has any."""
    events = json.loads(timeline.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    for process, name in names.items():
        marks = [event for event in events if event["pid"] == process and event["name"] == MEMORY_TRACK]
        peaks = [event for event in events if event["pid"] == process and event["name"] == MEMORY_PEAK_TRACK]
        if marks:
            owners = {owner: [float(mark["args"][owner]) for mark in marks] for owner in marks[0]["args"]}
            maxima = [float(value) for event in peaks for value in event["args"].values()]
            return MemoryStep(name, [mark["cat"] for mark in marks], owners, maxima)
    return None


def _save(title: str, step: MemoryStep, path: Path) -> Path:
    figure = Figure(figsize=(1.6 + 0.62 * len(step.boundaries), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    positions = range(len(step.boundaries))
    base = [0.0] * len(step.boundaries)
    for index, (owner, values) in enumerate(step.owners.items()):
        if any(values):
            axes.bar(positions, values, 0.7, base, color=f"C{index}", label=owner.replace("_", " "))
            base = [low + high for low, high in zip(base, values, strict=True)]
    axes.plot(positions, step.peaks, color="black", marker="_", markersize=14, linestyle="", label="peak until then")
    axes.set_xticks(positions, [each.replace("_", "\n") for each in step.boundaries], fontsize="x-small")
    axes.set_ylabel("MiB after")
    axes.set_ylim(0, 1.08 * max([*step.peaks, *base, 1e-3]))
    axes.set_title(f"{title}: memory of {step.process.partition(',')[0]}", fontsize="medium")
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.legend(fontsize="x-small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=90)
    temporary.replace(path)
    return path
