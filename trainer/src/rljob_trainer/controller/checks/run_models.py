"""Models of earlier runs (`source: run://...`): their checkpoints are converted to folders in Hugging Face's format,
and the job goes on as with any local model.

The conversion runs in the controller, before a device is reserved. The folders are in the run folder, which all workers
can read, and have the float32 weights of the checkpoint. A resumed run uses the same folders again, so it does not
need the earlier run any more.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from shutil import copyfile, rmtree

import torch

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.model import Model
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.checkpoints.adapter_export import write_merged_huggingface
from rljob_trainer.checkpoints.errors import DamagedError
from rljob_trainer.checkpoints.export import write_huggingface
from rljob_trainer.checkpoints.load import open_checkpoint
from rljob_trainer.checkpoints.run_source import (
    CONFIG_FILE,
    INITIAL_MODELS,
    RunCheckpoint,
    TrainedModel,
    converted_folder,
    find_run_checkpoint,
)
from rljob_trainer.checkpoints.storage import job_location
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.source import ModelLocation
from rljob_trainer.settings import Settings
from rljob_trainer.source_paths import PACKAGE_SCHEME, RUN_SCHEME, looks_local
from rljob_trainer.workers.trained_worker import ADAPTER_PREFIX, MODEL_PREFIX

log = logging.getLogger(__name__)


def with_run_models(
    job: TrainerJob, settings: Settings, doing: Callable[[str], None], *, is_resumed: bool
) -> TrainerJob:
    """Returns the job with the folder of a converted model in place of each source `run://...`. `is_resumed`: whether
    folders of an earlier attempt are used as they are. Raises ConfigurationError if a source does not name a usable
    checkpoint, CheckpointError if a folder cannot be written."""

    def folder_of(field: str, source: str) -> str:
        if not source.startswith(RUN_SCHEME):
            return source
        if settings.ray_address and job_location(job) is not None:
            raise ConfigurationError(
                f"{field}: {source!r} needs storage that all nodes share, but checkpoint.storage is a bucket; use "
                "persistentVolumeClaim, or a folder with the run's export"
            )
        folder = converted_folder(settings.run_folder, source)
        if not (is_resumed and folder.is_dir()):
            found = find_run_checkpoint(source, settings.job_folder, field)
            doing(f"converts the checkpoint of {source}")
            _convert(found, folder, settings.cache_folder, f"{field}: {source!r}", doing)
        return str(folder)

    return job.model_copy(update={"spec": _with_sources(job.spec, folder_of)})


def with_run_names(job: TrainerJob, named: TrainerJob, run_folder: Path) -> TrainerJob:
    """Returns the job with the sources `run://...` of the job `named` in place of the folders of converted models."""
    names: dict[str, str] = {}

    def remember(_field: str, source: str) -> str:
        names[str(converted_folder(run_folder, source))] = source
        return source

    _with_sources(named.spec, remember)
    return job.model_copy(update={"spec": _with_sources(job.spec, lambda _, source: names.get(source, source))})


def trained_model(job: TrainerJob, location: ModelLocation) -> TrainedModel:
    """Returns the record of the policy's initial model for later runs that start from this run's checkpoints."""
    model, training = location.model, job.spec.training
    source = model.source
    if looks_local(source, location.base_folder) and not source.startswith(PACKAGE_SCHEME):
        source = str((location.base_folder / os.path.expanduser(source)).absolute())
    return TrainedModel(source=source, revision=model.revision, lora=training.model.lora, seed=training.seed)


def remove_converted(run_folder: Path) -> None:
    """Removes the folders of converted models."""
    rmtree(run_folder / INITIAL_MODELS, ignore_errors=True)


def _convert(found: RunCheckpoint, folder: Path, cache_folder: Path, seen: str, doing: Callable[[str], None]) -> None:
    """Writes the checkpoint's model to `folder`, which appears complete or not at all. Verifies the digests of all
    weights."""

    def report(num_read: int, num_tensors: int) -> None:
        doing(f"converts the checkpoint of step {found.checkpoint.step}; {num_read} of {num_tensors} tensors read")

    started, path, trained = time.monotonic(), found.checkpoint.path, found.trained
    try:
        weights = open_checkpoint(path)
        if trained.lora is None:
            write_huggingface(folder, found.model_config, weights, MODEL_PREFIX, torch.float32, on_progress=report)
        else:
            base = Model(source=trained.source, revision=trained.revision)
            base_folder = _base_folder(base, cache_folder, seen)
            adapters = AdapterSettings(trained.lora, trained.seed)
            write_merged_huggingface(
                folder, base_folder, weights, ADAPTER_PREFIX, adapters, base, torch.float32, report
            )
    except DamagedError as error:
        raise ConfigurationError(
            f"{seen}: the checkpoint {path} is damaged ({error}); name another step of the run with @step-N"
        ) from error
    # An export of the new run has the precision of this configuration.
    copyfile(found.model_config / CONFIG_FILE, folder / CONFIG_FILE)
    log.info("%s: converted step %d of %s in %.0f s", seen, found.checkpoint.step, path, time.monotonic() - started)


def _base_folder(base: Model, cache_folder: Path, seen: str) -> Path:
    """The folder of the model that adapters were trained on."""
    try:
        return ModelLocation(base, cache_folder, Path("/")).folder()
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{seen}: its checkpoints have only adapters, and the model that they were trained on cannot be used "
            f"({error}); restore it, or name the run's export instead"
        ) from error


def _with_sources(spec: RLJobSpec, changed: Callable[[str, str], str]) -> RLJobSpec:
    """Returns the spec with `changed(field, source)` as the source of each model that is loaded."""
    training, roles = spec.training, spec.roles
    source = changed("spec.training.model.source", training.model.source)
    update: dict[str, object] = {"model": training.model.model_copy(update={"source": source})}
    trains = training.steps > 0
    if trains and (critic := training.critic) is not None and critic.model.source is not None:
        source = changed("spec.training.critic.model.source", critic.model.source)
        update["critic"] = critic.model_copy(update={"model": critic.model.model_copy(update={"source": source})})
    if trains and (reference := roles.ref.model) is not None:
        source = changed("spec.roles.ref.model.source", reference.source)
        own = reference.model_copy(update={"source": source})
        roles = roles.model_copy(update={"ref": roles.ref.model_copy(update={"model": own})})
    rewards = list(training.rewards)
    for index, reward in enumerate(rewards):
        if reward.reward_model is not None:
            source = changed(f"spec.training.rewards[{index}].rewardModel.source", reward.reward_model.source)
            model = reward.reward_model.model_copy(update={"source": source})
            rewards[index] = reward.model_copy(update={"reward_model": model})
    training = training.model_copy(update={**update, "rewards": tuple(rewards)})
    return spec.model_copy(update={"training": training, "roles": roles})
