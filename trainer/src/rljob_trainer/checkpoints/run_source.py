"""Models from checkpoints of earlier runs: `run://RUN_FOLDER` is the newest complete checkpoint of a run, and
`run://RUN_FOLDER@step-20` that of step 20.

    <run folder>/model-config/config.json, tokenizer.json, ...    configuration and tokenizer of the trained model
                              trained-model.json                  what the checkpoints do not have (`TrainedModel`)
    <run folder>/checkpoints/                                     see `layout`

On a cluster, `checkpoints/` is beside the run folder, in the job's folder. A source may name either folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from rljob_api.base import WireModel
from rljob_api.scalars import Count
from rljob_api.tolerant_reading import CHECKPOINT, read_document
from rljob_api.v1alpha1.model import Lora
from rljob_trainer.checkpoints.fencing import newest_start, visible_checkpoints
from rljob_trainer.checkpoints.layout import CheckpointFolder, is_committed
from rljob_trainer.checkpoints.storage import CHECKPOINTS, RUN
from rljob_trainer.errors import ConfigurationError, described
from rljob_trainer.source_paths import RUN_SCHEME

MODEL_CONFIG = "model-config"
INITIAL_MODELS = "initial-models"
"""Folders in the run folder: MODEL_CONFIG is shown above; INITIAL_MODELS has the converted models that the run itself
started from."""
TRAINED_MODEL_FILE = "trained-model.json"
CONFIG_FILE = "config.json"
COPIED_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
"""Endings of the files of a model's configuration and tokenizer."""

_SOURCE = re.compile(r"run://(?P<path>.+?)(@step-(?P<step>\d{1,10}))?")


class TrainedModel(WireModel):
    """What is needed, in addition to a checkpoint, to make a model from it."""

    source: str
    """The model that training started from: a repository of the hub, a `package://` path, or an absolute path."""
    revision: str | None = None
    """The commit of a model of the hub."""
    lora: Lora | None = None
    """With adapters, checkpoints have only the adapters."""
    seed: Count = 0


@dataclass(frozen=True)
class RunCheckpoint:
    """A complete checkpoint of an earlier run."""

    model_config: Path
    """The folder with the configuration and tokenizer of its model."""
    checkpoint: CheckpointFolder
    trained: TrainedModel


def find_run_checkpoint(source: str, base_folder: Path, where: str) -> RunCheckpoint:
    """Finds the checkpoint that a source names; a relative path starts at `base_folder`. Checks names only, not the
    content of files. Raises ConfigurationError, starting with `where`."""
    match = _SOURCE.fullmatch(source)
    seen = f"{where}: {source!r}"
    if match is None or match["path"].startswith("s3://"):
        raise ConfigurationError(
            f"{seen} does not name the folder of a run; write run://RUN_FOLDER or run://RUN_FOLDER@step-20 (copy a run "
            "from a bucket or a cluster first, with `rljob get-results NAME --checkpoints`)"
        )
    path = base_folder / os.path.expanduser(match["path"])
    # Unlike `Path.is_dir`, it also returns False for a name that is too long.
    if not os.path.isdir(path):
        raise ConfigurationError(f"{seen} not found (looked for {path}); check the path of the run's folder")
    run_folder, root = _folders(path)
    if not root.is_dir():
        advice = "name the folder of a run, such as runs/NAME"
        if (path / CONFIG_FILE).is_file():
            advice = f"{path} is a model; name it without {RUN_SCHEME}"
        raise ConfigurationError(f"{seen} has no checkpoints (looked for {root}); {advice}")
    checkpoint = _checkpoint(root, None if match["step"] is None else int(match["step"]), seen)
    if not (run_folder / MODEL_CONFIG / CONFIG_FILE).is_file():
        raise ConfigurationError(
            f"{seen} has checkpoints, but no {MODEL_CONFIG}/ with the configuration and tokenizer of its model (looked "
            f"for {run_folder / MODEL_CONFIG}); name the run's export instead, such as {path}/export"
        )
    return RunCheckpoint(run_folder / MODEL_CONFIG, checkpoint, _trained_model(run_folder / MODEL_CONFIG, seen))


def converted_folder(run_folder: Path, source: str) -> Path:
    """The folder into which a run converts the checkpoint of a source."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", source.removeprefix(RUN_SCHEME)).strip("-")[-60:]
    return run_folder / INITIAL_MODELS / f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def write_model_config(run_folder: Path, model_folder: Path, trained: TrainedModel) -> None:
    """Copies the configuration and the tokenizer of the model in `model_folder` into the run folder."""
    target = run_folder / MODEL_CONFIG
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for path in settings_files(model_folder):
        shutil.copyfile(path, temporary / path.name)
    (temporary / TRAINED_MODEL_FILE).write_text(trained.model_dump_json(by_alias=True, exclude_none=True))
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def settings_files(model_folder: Path) -> list[Path]:
    """The files of a model's configuration and tokenizer, without its weights and their index."""
    return [
        path
        for path in sorted(model_folder.iterdir())
        if path.is_file() and path.suffix in COPIED_SUFFIXES and not path.name.endswith(".index.json")
    ]


def _folders(path: Path) -> tuple[Path, Path]:
    """The run folder and the folder of its checkpoints."""
    for run_folder, root in ((path / RUN, path / CHECKPOINTS), (path, path.parent / CHECKPOINTS)):
        if (run_folder / MODEL_CONFIG).is_dir() and root.is_dir():
            return run_folder, root
    return path, path / CHECKPOINTS


def _trained_model(model_config: Path, seen: str) -> TrainedModel:
    path = model_config / TRAINED_MODEL_FILE
    try:
        return read_document(TrainedModel, json.loads(path.read_bytes()), CHECKPOINT).value
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{seen}: {path} cannot be read ({described(error)}); name the run's export instead"
        ) from error


def _checkpoint(root: Path, step: int | None, seen: str) -> CheckpointFolder:
    """The newest complete checkpoint, or that of a step."""
    folders = [each for each in visible_checkpoints(root, max(1, newest_start(root))) if is_committed(each.path)]
    found = next((each for each in folders if step in (None, each.step)), None)
    if found is not None:
        return found
    if not folders:
        raise ConfigurationError(
            f"{seen} has no complete checkpoint (looked in {root}); wait for its first checkpoint, or name another run"
        )
    steps = ", ".join(str(each.step) for each in sorted(folders))
    raise ConfigurationError(f"{seen} has no checkpoint of that step; choose one of its steps ({steps})")
