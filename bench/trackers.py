"""The time of a step without a tracker, with trackers that work, and with servers that hang, are slow or fail.

    python bench/trackers.py [--quick] [--json PATH]

A step here is a fixed computation on one thread of the controller's process, then the metrics of a step for the
trackers. All contenders take turns in one run, step by step, while the processes of all trackers are alive. The first
round does not count.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.job import RLJob
from rljob_bench.command_line import Options, read_options
from rljob_bench.machine import installed_versions
from rljob_bench.report import OURS, Bar, Measurement, Report
from rljob_bench.rounds import interleaved
from rljob_testing.training import training_runs
from rljob_testing.training.tracker_servers import answering_server, hanging_server
from rljob_trainer.settings import read_settings
from rljob_trainer.trackers.trackers import Trackers

NO_TRACKER = f"{OURS}, no tracker"
NUM_METRICS = 90
"""A step of a job with default settings has about as many."""
MATRIX_SIZE, NUM_PRODUCTS = 512, 12
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
        with contenders(folder) as started:
            report.add(measured(started, options))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.write(options.json_path)


@contextmanager
def contenders(folder: Path) -> Iterator[dict[str, Trackers]]:
    """The trackers of each contender, which have begun. They are ended without waiting for those that hang."""
    with ExitStack() as stack:
        hanging, failing = stack.enter_context(hanging_server()), stack.enter_context(answering_server(500))
        slow = stack.enter_context(answering_server(200, seconds=2.0))
        found = {
            NO_TRACKER: trackers(folder / "none", []),
            "W&B, offline": trackers(folder / "offline", [OFFLINE]),
            "MLflow, folder": trackers(folder / "folder", [FOLDER]),
            "both": trackers(folder / "both", [OFFLINE, FOLDER]),
            "W&B, server hangs": trackers(folder / "hangs", [ONLINE], hanging),
            "W&B, server fails": trackers(folder / "fails", [ONLINE], failing),
            "MLflow, server hangs": trackers(folder / "mlflow-hangs", [FOLDER], hanging),
            "MLflow, server fails": trackers(folder / "mlflow-fails", [FOLDER], failing),
            "MLflow, server is slow": trackers(folder / "slow", [FOLDER], slow),
        }
        # The libraries load in seconds, which do not belong to a step.
        time.sleep(15.0)
        yield found
        for each in found.values():
            each.end(0, lambda: True)


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


def measured(started: Mapping[str, Trackers], options: Options) -> Measurement:
    """Times steps of all contenders."""
    metrics = {f"part/metric_{number}": number / 7 for number in range(NUM_METRICS)}
    matrix = torch.rand(MATRIX_SIZE, MATRIX_SIZE)
    numbers = dict.fromkeys(started, 0)
    writes: dict[str, list[float]] = {name: [] for name in started}

    def step(name: str) -> list[float]:
        began = time.perf_counter()
        for _ in range(NUM_PRODUCTS):
            matrix @ matrix
        computed = time.perf_counter()
        numbers[name] += 1
        started[name].write(numbers[name], metrics)
        ended = time.perf_counter()
        writes[name].append(ended - computed)
        return [ended - began]

    num_rounds = 5 if options.is_quick else 300
    timings = interleaved({name: partial(step, name) for name in started}, num_rounds)
    base = timings[NO_TRACKER].median
    rows = {
        name: (
            each.median * 1e3,
            each.median / base,
            sorted(writes[name])[len(writes[name]) // 2] * 1e3,
            max(writes[name][1:]) * 1e3,
        )
        for name, each in timings.items()
    }
    slowest = max(each.median for each in timings.values()) / base
    return Measurement(
        f"A step of {NUM_PRODUCTS} products of matrices and {NUM_METRICS} metrics, {num_rounds - 1} steps each",
        ("step, ms", f"/ {NO_TRACKER}", "of it metrics, ms", "slowest, ms"),
        rows,
        (Bar("the slowest median step, relative to one without a tracker", slowest, 1.05),),
        seconds={name: each.seconds for name, each in timings.items()},
    )


if __name__ == "__main__":
    main()
