"""The time of a step without a tracker, with trackers that work, and with servers that hang, are slow or fail.

    python bench/trackers.py [--quick] [--json PATH]

A step here is a fixed computation on one thread of the controller's process, then the metrics of a step for the
trackers. Only one contender's processes are alive at a time; just before they start and just after they end, the same
number of steps is measured without a tracker. The end of a run, with its page, is not measured.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.job import RLJob
from rljob_bench.command_line import Options, read_options
from rljob_bench.machine import installed_versions
from rljob_bench.report import Bar, Measurement, Report
from rljob_testing.training import training_runs
from rljob_testing.training.tracker_servers import answering_server, hanging_server
from rljob_trainer.settings import read_settings
from rljob_trainer.trackers.trackers import Trackers

NUM_METRICS = 90
"""A step of a job with default settings has about as many."""
MATRIX_SIZE, NUM_PRODUCTS = 512, 12
LOAD_SECONDS, END_SECONDS = 15.0, 3.0
"""Pauses after the start and after the end of a contender's processes."""
OFFLINE: training_runs.Document = {"type": "WandB", "wandb": {"mode": "Offline"}}
ONLINE: training_runs.Document = {"type": "WandB"}
FOLDER: training_runs.Document = {"type": "MLflow"}


def main() -> None:
    """Runs the benchmark."""
    options = read_options(__doc__.splitlines()[0])
    os.environ |= {"OMP_NUM_THREADS": "1", "RLJOB_SPEC": "unused", "WANDB_API_KEY": "0" * 40}
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    torch.set_num_threads(1)
    report = Report("bench/trackers.py", installed_versions(("wandb", "mlflow-skinny", "torch")))
    if options.is_quick:
        report.notes.append("--quick only checks that the program works; its numbers have no meaning")
    report.print_head()
    folder = Path(tempfile.mkdtemp())
    try:
        with servers() as contenders:
            report.add(measured(contenders, folder, options))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.write(options.json_path)


@contextmanager
def servers() -> Iterator[dict[str, tuple[list[training_runs.Document], str]]]:
    """The trackers of each contender, and the address of its server."""
    with ExitStack() as stack:
        hanging, failing = stack.enter_context(hanging_server()), stack.enter_context(answering_server(500))
        slow = stack.enter_context(answering_server(200, seconds=2.0))
        yield {
            "W&B, offline": ([OFFLINE], ""),
            "MLflow, folder": ([FOLDER], ""),
            "both": ([OFFLINE, FOLDER], ""),
            "W&B, server hangs": ([ONLINE], hanging),
            "W&B, server fails": ([ONLINE], failing),
            "MLflow, server hangs": ([FOLDER], hanging),
            "MLflow, server fails": ([FOLDER], failing),
            "MLflow, server is slow": ([FOLDER], slow),
        }


def trackers(folder: Path, kinds: list[training_runs.Document], server: str = "") -> Trackers:
    """Trackers that have begun. `server`: the address for those that are not local."""
    folder.mkdir()
    variables = {"RLJOB_RUN_FOLDER": str(folder), "WANDB_BASE_URL": server, "MLFLOW_TRACKING_URI": server}
    os.environ |= {name: value for name, value in variables.items() if value}
    job = RLJob.from_wire(training_runs.small_job(trackers=[*kinds]))
    started = Trackers()
    started.start(job.spec.training.trackers, read_settings())
    started.begin(TrainerJob(name="bench", spec=job.spec), read_settings(), None)
    for name in ("WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        os.environ.pop(name, None)
    return started


def measured(
    contenders: Mapping[str, tuple[list[training_runs.Document], str]], folder: Path, options: Options
) -> Measurement:
    """Times steps of each contender, and steps without a tracker before and after them."""
    num_steps = 3 if options.is_quick else 100
    rows, seconds = dict[str, tuple[float | None, ...]](), dict[str, tuple[float, ...]]()
    without = [steps(Trackers(), num_steps)]
    for number, (name, (kinds, server)) in enumerate(contenders.items()):
        started = trackers(folder / str(number), kinds, server)
        # The libraries load in seconds, which do not belong to a step.
        time.sleep(0.0 if options.is_quick else LOAD_SECONDS)
        found = steps(started, num_steps)
        started.end(0, lambda: True)
        time.sleep(0.0 if options.is_quick else END_SECONDS)
        without.append(steps(Trackers(), num_steps))
        base = median(each.step for part in without[-2:] for each in part)
        step, writes = median(each.step for each in found), [each.write for each in found]
        rows[name] = (step * 1e3, base * 1e3, step / base, median(writes) * 1e3, max(writes) * 1e3)
        seconds[name] = tuple(each.step for each in found)
    slowest = max(ratio for _, _, ratio, _, _ in rows.values() if ratio is not None)
    return Measurement(
        f"A step of {NUM_PRODUCTS} products of matrices and {NUM_METRICS} metrics, {num_steps} steps each",
        ("step, ms", "without a tracker, ms", "ratio", "of it metrics, ms", "slowest, ms"),
        rows,
        (Bar("the slowest median step, relative to steps without a tracker", slowest, 1.05),),
        seconds=seconds,
    )


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, and of it those in which the metrics are handed to the trackers."""

    step: float
    write: float


def steps(started: Trackers, num_steps: int) -> list[StepSeconds]:
    """Makes steps; the first does not count."""
    metrics = {f"part/metric_{number}": number / 7 for number in range(NUM_METRICS)}
    matrix, found = torch.rand(MATRIX_SIZE, MATRIX_SIZE), list[StepSeconds]()
    for number in range(num_steps + 1):
        began = time.perf_counter()
        for _ in range(NUM_PRODUCTS):
            matrix @ matrix
        computed = time.perf_counter()
        started.write(number + 1, metrics)
        ended = time.perf_counter()
        found.append(StepSeconds(ended - began, ended - computed))
    return found[1:]


if __name__ == "__main__":
    main()
