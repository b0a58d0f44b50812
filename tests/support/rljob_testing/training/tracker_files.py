"""A job and variables for trackers. Reads what trackers have written without a server: the files of offline runs of
W&B, and MLflow's folder."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run
from wandb.proto import wandb_internal_pb2

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.job import RLJob
from rljob_testing.settings import inherited_environment, inherited_python_path
from rljob_testing.training import training_runs

KEY = "0123456789" * 4
"""A value that W&B accepts as an API key."""
ENVIRONMENT = {
    **inherited_environment(),
    "PYTHONPATH": os.pathsep.join([str(training_runs.SUPPORT_FOLDER), *inherited_python_path()]),
    "WANDB_API_KEY": KEY,
}
Rows = dict[int, dict[str, float]]
"""By step: the metrics."""

_FILE_HEADER_BYTES = 7
_BLOCK_BYTES = 32_768
_CHUNK_HEADER = struct.Struct("<IHB")
"""Checksum, length, kind of a chunk."""
_FULL, _LAST = 1, 4


def job() -> TrainerJob:
    """A small job."""
    return TrainerJob(name="small", namespace="team", spec=RLJob.from_wire(training_runs.small_job()).spec)


@dataclass
class WandbFile:
    """The content of one attempt's file."""

    run_id: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, object] = field(default_factory=dict)
    rows: Rows = field(default_factory=dict)
    exit_code: int | None = None
    """None if the run was not finished."""


def wandb_files(run_folder: Path) -> list[WandbFile]:
    """The offline runs of all attempts in the folder, oldest first."""
    return [_wandb_file(path) for path in sorted((run_folder / "wandb").glob("offline-run-*/*.wandb"))]


def _wandb_file(path: Path) -> WandbFile:
    found = WandbFile()
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                found.run_id, found.tags = record.run.run_id, list(record.run.tags)
                found.config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            case "history":
                row = {_name(item): json.loads(item.value_json) for item in record.history.item}
                found.rows.setdefault(record.history.step.num, {}).update(row)
            case "exit":
                found.exit_code = record.exit.exit_code
    return found


def _name(item: wandb_internal_pb2.HistoryItem) -> str:
    return item.key or "/".join(item.nested_key)


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's logs: blocks of chunks, and records of one or several chunks."""
    position, record = _FILE_HEADER_BYTES, b""
    while position + _CHUNK_HEADER.size <= len(data):
        left_in_block = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left_in_block < _CHUNK_HEADER.size:
            position += left_in_block
            continue
        _, length, kind = _CHUNK_HEADER.unpack_from(data, position)
        position += _CHUNK_HEADER.size
        if position + length > len(data):
            return  # The program is writing it.
        record += data[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            yield record
            record = b""


@dataclass
class MlflowRecord:
    """A run in MLflow's folder, or on a server."""

    status: str
    tags: dict[str, str]
    params: dict[str, str]
    values: dict[str, list[tuple[int, float]]]
    """By metric: step and value of each point, sorted."""
    files: dict[str, str]
    """By path: the text."""


def mlflow_runs(run_folder: Path, address: str | None = None) -> list[MlflowRecord]:
    """All runs, in all experiments. `address`: that of a server; None for the folder in the run folder, which needs the
    variables of `tracker_process.VARIABLES`."""
    client = MlflowClient(tracking_uri=address or (run_folder / "mlruns").as_uri())
    experiments = [each.experiment_id for each in client.search_experiments()]
    return [_mlflow_record(client, run) for run in client.search_runs(experiments)]


def _mlflow_record(client: MlflowClient, run: Run) -> MlflowRecord:
    run_id = run.info.run_id
    values = {
        name: sorted((point.step, point.value) for point in client.get_metric_history(run_id, name))
        for name in run.data.metrics
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(client.download_artifacts(run_id, "", folder))
        files = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}
    return MlflowRecord(run.info.status, dict(run.data.tags), dict(run.data.params), values, files)
