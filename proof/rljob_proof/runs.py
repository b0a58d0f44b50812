"""Runs variants of the quickstart, one after the other in this process, on one Ray cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ruamel.yaml import YAML

from rljob_api.constants import RUN_STATE_FILE_NAME
from rljob_api.contract_documents import load_run_state
from rljob_api.run_state import RunPhase
from rljob_testing.ray_clusters import local_ray
from rljob_testing.training import training_runs

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_CPUS = 3
"""Logical CPUs of Ray, which only counts them."""


@dataclass(frozen=True)
class Runs:
    """Runs, each in its own folder below `folder`."""

    folder: Path
    ray_address: str

    def completed(self, name: str, job: training_runs.Document) -> training_runs.RunFiles:
        """The files of a completed run, which is made if needed. Raises SystemExit if the folder has a run of another
        job, or if the run fails."""
        place = self.folder / name
        trainer = training_runs.RunTrainer(place)
        job_file, state = place / "job.yaml", trainer.files.folder / RUN_STATE_FILE_NAME
        if job_file.exists() and json.loads(job_file.read_text()) != job:
            raise SystemExit(f"{job_file}: another job was run there; choose another --folder, or remove {place}")
        earlier = load_run_state(state.read_text(encoding="utf-8")) if state.exists() else None
        if earlier is not None and earlier.phase is RunPhase.COMPLETE:
            return trainer.files
        place.mkdir(parents=True, exist_ok=True)
        ended = trainer(job, self.ray_address, attempt=1 if earlier is None else earlier.attempt + 1)
        (place / "terminal.log").write_text(ended.terminal)
        if ended.exit_code != 0:
            raise SystemExit(f"{place}: exit code {ended.exit_code}; see terminal.log")
        return trainer.files


@contextmanager
def runs_in(folder: Path) -> Iterator[Runs]:
    """Runs below a folder. Completed runs are not repeated, and an interrupted run continues from its checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    with local_ray.ray_cluster(NUM_CPUS, folder / "ray.log") as address:
        yield Runs(folder, address)


def example_job(name: str, training: training_runs.Document, *, checkpoint_every: int) -> training_runs.Document:
    """A file of examples/ with changes of spec.training and without export; mappings are merged."""
    job = cast(training_runs.Document, YAML(typ="safe").load((REPOSITORY / "examples" / name).read_text()))
    checkpoint: training_runs.Document = {"everySteps": checkpoint_every, "exportHuggingFace": "Never"}
    return training_runs.merged(job, {"spec": {"training": training, "checkpoint": checkpoint}})
