"""The job of `rljob evaluate`: the evaluations of a job file, on given weights, without training. A pure function,
except that it checks which files of the weights exist."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rljob_api.names import similar_names
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.optional_roles import absent_roles
from rljob_api.v1alpha1.spec import RefRole, RLJobSpec, TrainRole
from rljob_api.v1alpha1.training import Training
from rljob_cli.errors import CliError

RUN_SCHEME = "run://"
_STEP = re.compile(r"(?P<path>.+)(?P<step>@step-\d{1,10})")
_CHECKPOINT_FOLDER = re.compile(r"step-(?P<step>\d{8,10})\.start-\d{4,10}")


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """What `rljob evaluate` adds to the options of `rljob run`."""

    checkpoint: str | None = None
    """A run's folder, perhaps with `@step-20` at its end, the folder of a checkpoint, or the folder of a model. None:
    the job's own model."""
    names: Sequence[str] = ()
    """The evaluations; empty for all."""

    def arguments(self) -> list[str]:
        """The options of the command line."""
        checkpoint = [] if self.checkpoint is None else ["--checkpoint", self.checkpoint]
        return [*checkpoint, *(part for name in self.names for part in ("--evaluation", name))]


def evaluation_job(job: RLJob, options: EvaluationOptions) -> RLJob:
    """The job that only evaluates: with 0 steps, and without the settings that only training uses.

    Raises:
        CliError: there is no such evaluation, or `--checkpoint` has an unsupported value.
    """
    spec, training = job.spec, job.spec.training
    # Adapters that are not trained add nothing, and a checkpoint of adapters becomes a merged model.
    model: dict[str, object] = {"lora": None}
    if options.checkpoint is not None:
        model |= {"source": checkpoint_source(options.checkpoint), "revision": None}
    changes: dict[str, object] = {
        "model": training.model.model_copy(update=model),
        "evaluations": _chosen(training, options.names),
        "steps": 0,
        "optimizer": training.optimizer.model_copy(update={"warmup_steps": 0}),
        "critic": None,
        "trackers": (),
        "timeline_steps": (),
        "profile": None,
    }
    checkpoint = {"storage": None, "keep_best": None, "keep_finished_groups": False}
    roles = {"ref": RefRole(model=spec.roles.ref.model), "critic": TrainRole()}
    spec = spec.model_copy(
        update={
            "training": training.model_copy(update=changes),
            "checkpoint": spec.checkpoint.model_copy(update=checkpoint),
            "roles": spec.roles.model_copy(update=roles),
        }
    )
    return job.model_copy(update={"spec": spec.model_copy(update={"pools": _used_pools(spec)})})


def checkpoint_source(text: str) -> str:
    """The value of `model.source` for a value of `--checkpoint`.

    Raises:
        CliError: there is no such folder, or it is in a bucket.
    """
    if text.startswith("s3://"):
        raise CliError(
            f"--checkpoint: {text} is in a bucket, which is not supported; copy the run first with `rljob get-results"
            " NAME --checkpoints`, and name the copy's folder"
        )
    name, step = split_step(text)
    path = Path(os.path.expanduser(name)).absolute()
    if not (name and os.path.isdir(path)):
        raise CliError(
            f"--checkpoint: {name!r} is not a folder (looked for {path}); name a run such as runs/NAME or"
            " runs/NAME@step-20, or the folder of an exported model"
        )
    if (path / "config.json").is_file():
        if step:
            raise CliError(f"--checkpoint: {path} is a model, which has no steps; remove {step}")
        return str(path)
    if (folder := _CHECKPOINT_FOLDER.fullmatch(path.name)) is not None:
        return f"{RUN_SCHEME}{path.parent.parent}@step-{int(folder['step'])}"
    return f"{RUN_SCHEME}{path}{step}"


def split_step(text: str) -> tuple[str, str]:
    """The folder of a run, and `@step-N` or an empty string; `run://` in front is dropped."""
    name = text.removeprefix(RUN_SCHEME)
    found = _STEP.fullmatch(name)
    return (found["path"], found["step"]) if found else (name, "")


def _chosen(training: Training, names: Sequence[str]) -> tuple[object, ...]:
    """The evaluations with these names, in the order of the job."""
    known = [each.name for each in training.evaluations]
    if not known:
        raise CliError("spec.training.evaluations: the job has none; add one (docs/evaluation.md)")
    for name in names:
        if name not in known:
            near = similar_names(name, known)
            guess = f" (did you mean {near[0]}?)" if near else ""
            raise CliError(f"--evaluation: the job has no evaluation {name!r}{guess}; it has {', '.join(known)}")
    return tuple(each for each in training.evaluations if not names or each.name in names)


def _used_pools(spec: RLJobSpec) -> tuple[object, ...]:
    """The pools of the roles that an evaluation needs."""
    unneeded = {*absent_roles(spec), "ref", "critic"}
    used = {pool for role, pool in spec.placed_roles().items() if role not in unneeded}
    return tuple(pool for pool in spec.pools if pool.name in used)
