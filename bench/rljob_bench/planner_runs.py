"""Compares the planner with runs on this machine (bench/planner.py): calibrated by one run of each example, then
applied to other batch sizes and lengths, three times each.

A run is `rljob run` with few steps, as a user starts it. The predicted steps have the lengths of the run (as with
`rljob plan --from-run`), and only the constants of the calibrating run are used.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from ruamel.yaml import YAML

from rljob_bench.machine import REPOSITORY
from rljob_bench.report import Bar, Measurement
from rljob_cli.plan.from_run import calibration_run, compared
from rljob_cli.plan.run_record import read_run
from rljob_planner.advice.calibration import calibrated, cpu_constants
from rljob_planner.advice.comparison import STEP, ComparedMemory, ComparedTime
from rljob_planner.constants import Constants

MAX_STEP_ERROR = 0.15
MAX_MEMORY_ERROR = 0.1
NUM_REPEATS = 3
RUN_SECONDS = 1800.0
_MIB = 2**20


@dataclass(frozen=True)
class RunCase:
    """A job that is derived from an example."""

    name: str
    example: str
    num_steps: int
    training: Mapping[str, object] = field(default_factory=dict)
    """Fields of spec.training that differ from the example."""
    rollout: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class RunFamily:
    """A run that calibrates, and runs that are predicted with its constants."""

    title: str
    calibrating: RunCase
    others: tuple[RunCase, ...]


def _family(title: str, example: str, num_steps: int, **others: Mapping[str, Mapping[str, object]]) -> RunFamily:
    name = title.split(maxsplit=1)[0].lower()
    cases = [
        RunCase(f"{name}-{key}", example, num_steps, each.get("training", {}), each.get("rollout", {}))
        for key, each in others.items()
    ]
    return RunFamily(title, RunCase(f"{name}-calibrate", example, num_steps), tuple(cases))


FAMILIES = (
    _family(
        "Demo (119 thousand parameters, 32 prompts x 16 responses of up to 8 tokens)",
        "quickstart.yaml",
        12,
        batch16={"training": {"batchSize": 16}},
        batch64={"training": {"batchSize": 64}},
        new16={"rollout": {"maxNewTokens": 16}},
        mini8={"training": {"miniBatchSize": 8}},
    ),
    _family(
        "Smol (SmolLM2, 135 million parameters, 8 prompts x 8 responses of up to 16 tokens)",
        "smollm2-arithmetic.yaml",
        6,
        batch4={"training": {"batchSize": 4}},
        batch16={"training": {"batchSize": 16}},
        new32={"rollout": {"maxNewTokens": 32, "stop": []}},
        micro1024={"training": {"maxTokensPerMicroBatch": 1024}},
    ),
)


def run_measurements(
    folder: Path, families: Sequence[RunFamily] = FAMILIES, num_repeats: int = NUM_REPEATS
) -> tuple[Measurement, ...]:
    """Time and memory of each family. Existing runs in `folder` (NAME-1, ...) are not repeated; a run takes a minute or
    two on two cores."""
    for repeat in range(1, num_repeats + 1):
        for family in families:
            for case in (family.calibrating, *family.others):
                ensure_run(folder, case, repeat)
    return tuple(each for family in families for each in _measured(folder, family, num_repeats))


def ensure_run(folder: Path, case: RunCase, repeat: int) -> Path:
    """Makes a run and returns its folder. Raises CalledProcessError if it fails."""
    run = folder / f"{case.name}-{repeat}"
    if (run / "metrics.jsonl").is_file():
        return run
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / f"{case.name}.yaml"
    write_job(job, case)
    command = [sys.executable, "-m", "rljob_cli", "run", str(job), "--run-folder", str(run)]
    subprocess.run(command, check=True, timeout=RUN_SECONDS, stdout=subprocess.DEVNULL)
    return run


def write_job(file: Path, case: RunCase) -> None:
    """Writes the example with fewer steps, and without evaluation and export."""
    yaml = YAML()
    job = yaml.load((REPOSITORY / "examples" / case.example).read_text())
    training = job["spec"]["training"]
    job["metadata"]["name"] = case.name
    training.pop("evaluations", None)
    training.update({"steps": case.num_steps, "timelineSteps": [3], "loggers": ["Console"], **case.training})
    training["rollout"].update(case.rollout)
    job["spec"]["checkpoint"] = {"everySteps": 1000, "keep": 1, "exportHuggingFace": "Never"}
    yaml.dump(job, file)


@dataclass(frozen=True)
class _Compared:
    """A run and its prediction."""

    step: float
    predicted_step: float
    memory: Mapping[str, ComparedMemory]

    @property
    def counted(self) -> ComparedMemory:
        """The moment of a step with the most memory."""
        moments = ("weight sync", "generation", "log-probs", "update")
        return max((self.memory[name] for name in moments if name in self.memory), key=lambda each: each.measured)


def _measured(folder: Path, family: RunFamily, num_repeats: int) -> tuple[Measurement, Measurement]:
    constants = calibrated([calibration_run(read_run(folder / f"{family.calibrating.name}-1"))], cpu_constants())
    cases = (family.calibrating, *family.others)
    found = {case.name: [_compared(run, constants) for run in _repeats(folder, case, num_repeats)] for case in cases}
    return _seconds(family, found), _memory(family, found)


def _repeats(folder: Path, case: RunCase, num_repeats: int) -> list[Path]:
    runs = (folder / f"{case.name}-{repeat}" for repeat in range(1, num_repeats + 1))
    return [run for run in runs if (run / "metrics.jsonl").is_file()]


def _compared(run: Path, constants: Constants) -> _Compared:
    times, memory = compared(calibration_run(read_run(run)), constants)
    step = next(each for each in times if each.name == STEP)
    return _Compared(*_ends(step), {each.name: each for each in memory})


def _ends(step: ComparedTime) -> tuple[float, float]:
    assert step.measured is not None
    assert step.predicted is not None
    return step.measured.median, step.predicted.likely


def _seconds(family: RunFamily, found: Mapping[str, Sequence[_Compared]]) -> Measurement:
    rows: dict[str, tuple[float | None, ...]] = {}
    worst = 0.0
    for name, runs in found.items():
        seconds = [each.step for each in runs]
        middle = median(seconds)
        spread = (max(seconds) - min(seconds)) / middle
        predicted = fmean(each.predicted_step for each in runs)
        rows[name] = (middle, spread, predicted, predicted / middle)
        if name != family.calibrating.name:
            worst = max(worst, abs(predicted / middle - 1) / max(MAX_STEP_ERROR, 2 * spread))
    bar = Bar("worst error, by the larger of 15 % and twice the spread of the repeats", worst, 1.0)
    header = ("median step, s", "spread", "predicted, s", "of measured")
    return Measurement(
        f"Seconds of a step, calibrated by {family.calibrating.name}-1: {family.title}",
        header,
        rows,
        (bar,),
        num_decimals=3,
    )


def _memory(family: RunFamily, found: Mapping[str, Sequence[_Compared]]) -> Measurement:
    rows: dict[str, tuple[float | None, ...]] = {}
    worst_counted, worst_process = 0.0, 0.0
    for name, runs in found.items():
        counted = max((each.counted for each in runs), key=lambda each: each.measured)
        processes = [each.memory["process"] for each in runs]
        measured = fmean(each.measured for each in processes)
        predicted = fmean(each.predicted for each in processes)
        rows[name] = (
            counted.measured / _MIB,
            counted.predicted / counted.measured,
            measured / _MIB,
            predicted / measured,
        )
        worst_counted = max(worst_counted, abs(counted.predicted / counted.measured - 1))
        if name != family.calibrating.name:
            worst_process = max(worst_process, abs(predicted / measured - 1))
    bars = (
        Bar("worst error of what the counters see", worst_counted, MAX_MEMORY_ERROR),
        Bar("worst error of the worker's process", worst_process, MAX_MEMORY_ERROR),
    )
    header = ("counted at most, MiB", "predicted of it", "process, MiB", "predicted of it")
    return Measurement(f"Memory of a worker: {family.title}", header, rows, bars, num_decimals=3)
