"""Shows that the run of an interrupted and resumed job is complete on a real MLflow server, which hangs for some steps.

    python proof/trackers.py [--folder FOLDER]

The server has an environment of its own (proof/other_packages/mlflow.txt), with SQLite. While the first attempt trains,
the server is stopped (SIGSTOP) for some steps; then the attempt is stopped by Ctrl-C, and a second one completes the
job. The exit code is 1 if the run on the server differs from metrics.jsonl.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rljob_proof.other_packages import python_with
from rljob_proof.runs import REPOSITORY
from rljob_testing.cluster.kubectl import wait_for
from rljob_testing.local_servers import free_port
from rljob_testing.training import training_runs
from rljob_testing.training.tracker_files import MlflowRecord, mlflow_runs

NUM_STEPS, STEPS_BEFORE, STEPS_WHILE_STOPPED = 12, 2, 3
START_SECONDS = 120.0
FILES = ("job.yaml", f"samples/heldout/step-{NUM_STEPS:06d}.json", "view.html")


def main() -> int:
    """Runs the program. The exit code is 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "trackers")
    folder = parser.parse_args().folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with running_server(python_with("mlflow"), folder) as (address, server):
        job = job_with(address)
        first = training_runs.LocalRun(folder, job)
        first.wait_for(lambda: len(first.files.training_steps()) >= STEPS_BEFORE and "MLflow: run" in first.output)
        os.killpg(server.pid, signal.SIGSTOP)
        num_steps = len(first.files.training_steps())
        first.wait_for(lambda: len(first.files.training_steps()) >= num_steps + STEPS_WHILE_STOPPED)
        os.killpg(server.pid, signal.SIGCONT)
        first.process.send_signal(signal.SIGINT)
        codes = [first.end()]
        second = training_runs.LocalRun(folder, job, "--resume")
        codes.append(second.end())
        runs = mlflow_runs(first.files.folder, address)
    found = {
        f"exit codes are 130 and 0: {codes}": codes == [130, 0],
        "no process is left": first.leftover_processes() == [] and second.leftover_processes() == [],
        "the job has one run": len(runs) == 1,
        **{text: holds for run in runs for text, holds in facts(run, first.files).items()},
    }
    for text, holds in found.items():
        print(f"{'yes' if holds else 'NO '}  {text}")
    return 0 if all(found.values()) else 1


def facts(run: MlflowRecord, files: training_runs.RunFiles) -> dict[str, bool]:
    """What must hold for the run on the server."""
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in files.metrics():
        for name in row.keys() - {"step", "wall_time"}:
            expected.setdefault(name, []).append((int(row["step"]), row[name]))
    different = [name for name in expected if run.values.get(name) != expected[name]]
    return {
        f"all {len(expected)} metrics are those of metrics.jsonl: {different[:3]}": not different,
        "the run is finished, in its second attempt": (run.status, run.tags["rljob.attempt"]) == ("FINISHED", "2"),
        "the server has the job, the samples and the page": set(FILES) <= set(run.files),
    }


def job_with(address: str) -> training_runs.Document:
    """A job with steps of about a second."""
    return training_runs.small_job(
        batchSize=64,
        rollout={"groupSize": 16},
        checkpoint={"everySteps": 100, "exportHuggingFace": "Never"},
        evaluations=[training_runs.held_out(num_prompts=24, every_steps=NUM_STEPS)],
        steps=NUM_STEPS,
        trackers=[{"type": "MLflow", "mlflow": {"trackingUri": address, "experiment": "proof"}}],
    )


@contextmanager
def running_server(python: Path, folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address and the process of a server, whose data is in the folder."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    store = [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    command = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *store]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [str(python), "-m", "mlflow", *command], stdout=log, stderr=log, start_new_session=True, cwd=folder
        )
    try:
        wait_for(lambda: is_healthy(address), f"the server to start, see {folder}/server.log", START_SECONDS, 0.2)
        yield address, server
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def is_healthy(address: str) -> bool:
    """Whether the server responds."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as response:
            return int(response.status) == 200
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
