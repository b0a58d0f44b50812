"""Finds files, folders, modules, programs and credentials that the job needs but that do not exist. This runs before
torch is loaded, because loading takes seconds. Later checks look at the content."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from rljob_api.rule import LOCAL_SOURCE
from rljob_api.training_checks import training_violations
from rljob_api.v1alpha1.dataset import Dataset
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.training import ProfilerType
from rljob_api.yaml_text import wire_path
from rljob_trainer.checkpoints.run_source import converted_folder, find_run_checkpoint
from rljob_trainer.datasets.rows import local_dataset
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.observability.nsys_profiles import NSYS, missing_nsys
from rljob_trainer.source_paths import RUN_SCHEME, local_path, looks_local
from rljob_trainer.trackers.tracker_checks import refuse_unusable_trackers
from rljob_trainer.user_functions import refuse_missing_module


def refuse_missing(
    spec: RLJobSpec, job_folder: Path, environment: Mapping[str, str], run_folder: Path, *, runs_workers_here: bool
) -> None:
    """Raises ConfigurationError for the first file, folder, module or program of the job that is missing, or for
    missing credentials of a tracker or of a service that scores responses. Does not import the user's code.

    `environment`: the variables of this process. `run_folder`: an earlier attempt may have converted models of other
    runs there, which are then no longer needed. `runs_workers_here`: whether workers have the programs that are
    installed here."""
    refuse_training_mistakes(spec)
    for where, path in _functions(spec):
        refuse_missing_module(path, where)
    for where, dataset in _datasets(spec):
        local_dataset(dataset, job_folder, where)
    for where, source in _models(spec):
        if source.startswith(RUN_SCHEME):
            if not converted_folder(run_folder, source).is_dir():
                find_run_checkpoint(source, job_folder, where)
        elif looks_local(source, job_folder):
            local_path(source, job_folder, where)
    _refuse_unusable_services(spec, job_folder, environment)
    profile = spec.training.profile
    if profile is not None and profile.type is ProfilerType.NSYS and runs_workers_here and not shutil.which(NSYS):
        raise missing_nsys("this machine")
    refuse_unusable_trackers(spec.training.trackers, environment)


def refuse_training_mistakes(spec: RLJobSpec) -> None:
    """Raises ConfigurationError for what `rljob` and not the API server checks (see `training_violations`), for a job
    that was not created with `rljob`."""
    for found in training_violations(spec):
        raise ConfigurationError(f"{wire_path(found.path)}: {found.message}")


def _functions(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    """Field and import path of each of the user's functions and environment classes."""
    if (environment := spec.training.environment) is not None:
        for index, each in enumerate(environment.classes or ()):
            yield f"spec.training.environment.classes[{index}].path ({each.name})", each.path
        if environment.session is not None:
            yield "spec.training.environment.session.path", environment.session.path
    for index, reward in enumerate(spec.training.rewards):
        if reward.function is not None:
            yield f"spec.training.rewards[{index}].function.path (reward {reward.name})", reward.function.path
    algorithm = spec.training.algorithm
    if algorithm.advantage.function is not None:
        yield "spec.training.algorithm.advantage.function.path", algorithm.advantage.function.path
    if algorithm.loss.function is not None:
        yield "spec.training.algorithm.loss.function.path", algorithm.loss.function.path


def _refuse_unusable_services(spec: RLJobSpec, job_folder: Path, environment: Mapping[str, str]) -> None:
    """Raises ConfigurationError if the key of a service that scores responses is not set, or if the file of a rubric
    does not exist."""
    for index, reward in enumerate(spec.training.rewards):
        service = reward.judge or reward.remote
        where = f"spec.training.rewards[{index}].{'judge' if reward.judge else 'remote'}"
        if service is not None and service.key_variable is not None and not environment.get(service.key_variable):
            raise ConfigurationError(
                f"{where}.keyVariable (reward {reward.name}): the environment variable {service.key_variable} is not "
                "set; set it in spec.env, from a Secret, or for `rljob run` in the shell"
            )
        if reward.judge is not None and re.search(LOCAL_SOURCE, reward.judge.rubric) is not None:
            local_path(reward.judge.rubric, job_folder, f"{where}.rubric (reward {reward.name})")


def _datasets(spec: RLJobSpec) -> Iterator[tuple[str, Dataset]]:
    for field, dataset in spec.training.sources.items():
        yield f"spec.training.{field}", dataset
    for index, each in enumerate(spec.training.evaluations):
        if each.dataset is not None:
            yield f"spec.training.evaluations[{index}].dataset", each.dataset


def _models(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    """Field and source of each model that is loaded."""
    yield "spec.training.model.source", spec.training.model.source
    trains = spec.training.steps > 0
    if trains and spec.roles.ref.model is not None:
        yield "spec.roles.ref.model.source", spec.roles.ref.model.source
    critic = spec.training.critic
    if trains and critic is not None and critic.model.source is not None:
        yield "spec.training.critic.model.source", critic.model.source
    for index, reward in enumerate(spec.training.rewards):
        if reward.reward_model is not None:
            yield f"spec.training.rewards[{index}].rewardModel.source", reward.reward_model.source
