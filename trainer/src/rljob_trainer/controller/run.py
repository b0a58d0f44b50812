"""One run from its start, or from a checkpoint, to the export. Importing this module takes seconds, because it loads
torch and transformers. So `__main__` imports it after the first report."""

from __future__ import annotations

import logging
from pathlib import Path

from rljob_api.constants import ExitCode
from rljob_api.contract_documents import TrainerJob
from rljob_api.job_file import resolved_job_text
from rljob_api.run_state import BestCheckpoint
from rljob_api.v1alpha1.spec import Metadata, RLJobSpec
from rljob_trainer.attempt_logs import prune_attempts
from rljob_trainer.checkpoints.bucket_run_folder import BucketRunFolder
from rljob_trainer.checkpoints.layout import read_manifest
from rljob_trainer.checkpoints.run_source import write_model_config
from rljob_trainer.checkpoints.storage import RUN, Location, checkpoint_location, job_location
from rljob_trainer.controller.build_run import Run, built_run
from rljob_trainer.controller.checkpointing import Checkpointing, ResumePoint
from rljob_trainer.controller.checks.fit import needs_critic
from rljob_trainer.controller.checks.run_models import (
    remove_converted,
    trained_model,
    with_run_models,
    with_run_names,
)
from rljob_trainer.controller.controller import Controller
from rljob_trainer.controller.evaluations.best_checkpoints import best_checkpoints_of
from rljob_trainer.controller.model_roles import num_workers_of
from rljob_trainer.controller.run_output import RunOutput
from rljob_trainer.controller.run_reporter import RunReporter
from rljob_trainer.controller.stop_request import StopRequest
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.settings import Settings
from rljob_trainer.trackers.trackers import Trackers
from rljob_trainer.workers.critic import CRITIC_PREFIX
from rljob_trainer.workers.factories import ACTOR

log = logging.getLogger(__name__)

EXPORT = "export"
"""Name of the folder with the exported model."""
RESOLVED_JOB_FILE = "resolved.yaml"
"""File name in the run folder."""


def run_job(
    job: TrainerJob,
    settings: Settings,
    reporter: RunReporter,
    stop: StopRequest,
    trackers: Trackers,
    bucket_copy: BucketRunFolder,
) -> int:
    """Sets up, resumes, trains, saves and exports. Returns the exit code, or raises TrainerError. Trackers go on."""
    checkpointing = checkpointing_of(job, settings, bucket_copy)
    point = checkpointing.find()
    bucket_copy.begin(settings)
    prune_attempts(settings.run_folder, settings.attempt)
    first_step = point.state.step if point else 0
    if point:
        check_point(point, job.spec, reporter)
    converted = with_run_models(job, settings, reporter.doing, is_resumed=point is not None)
    with built_run(converted, settings, point.state.choices if point else None, reporter.doing) as run:
        checkpointing.choices = run.choices
        write_records(settings.run_folder, job, run, is_new=point is None)
        job = run.job
        if point:
            point = loaded_point(checkpointing, point, run, reporter)
            first_step = point.state.step
        output = RunOutput(
            settings.run_folder,
            job.spec.training.loggers,
            first_step if point else None,
            job.spec.training.steps,
            run.workers.num_devices,
            trackers,
            job.spec.training.evaluations,
        )
        trackers.begin(job, settings, first_step if point else None)
        try:
            controller = Controller(job, run, output, reporter, checkpointing, stop)
            if point:
                controller.restore(point.state.parts)
                log.info("resumed from step %d (%s)", first_step, point.folder.name)
            controller.load_finished_groups(first_step)
            stop.raise_if_requested()
            reporter.training_started(first_step, controller.alarms.raised)
            output.start(first_step)
            stop.is_training = True
            if not controller.train(first_step, is_evaluated=point is not None and point.state.is_evaluated):
                reporter.stopping()
                step = controller.save_on_stop()
                reporter.stopped()
                saved = "; the checkpoint of this step is complete" if step else "; there is no checkpoint"
                log.warning("stopped as requested after step %d%s", step, saved)
                return ExitCode.INTERRUPTED
            exported = controller.export(export_location(job, settings))
            reporter.complete(exported.as_uri() if exported else None)
        finally:
            output.close()
        for line in output.summary():
            log.info("%s", line)
    if job.spec.training.steps == 0:
        remove_converted(settings.run_folder)
    return ExitCode.SUCCESS


def checkpointing_of(job: TrainerJob, settings: Settings, bucket_copy: BucketRunFolder) -> Checkpointing:
    """Returns what saves and loads the checkpoints of this start."""
    root = checkpoint_location(job, settings.checkpoint_folder)
    best = best_checkpoints_of(job.spec)
    checkpointing = Checkpointing(job.spec.checkpoint, root, settings.start_number, job.name, best)
    checkpointing.before_commit = bucket_copy.copy_now
    return checkpointing


def export_location(job: TrainerJob, settings: Settings) -> Location:
    """Returns the folder of the exported model."""
    bucket_folder = job_location(job)
    return (settings.run_folder if bucket_folder is None else bucket_folder / RUN) / EXPORT


def write_records(run_folder: Path, named: TrainerJob, run: Run, *, is_new: bool) -> None:
    """Writes the resolved job, with the sources of the job `named`, and what later runs need besides checkpoints.
    `is_new`: whether this start has not resumed from a checkpoint."""
    write_resolved_job(run_folder / RESOLVED_JOB_FILE, with_run_names(run.job, named, run_folder))
    if is_new and run.job.spec.training.steps > 0:
        write_model_config(run_folder, run.model_folder, trained_model(run.job, run.model_location))


def write_resolved_job(path: Path, job: TrainerJob) -> None:
    """Writes the job with every default, the expanded recipe, and the resolved `Auto` settings. The file is replaced
    atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(
        resolved_job_text(Metadata(name=job.name, namespace=job.namespace), job.spec), encoding="utf-8"
    )
    temporary.replace(path)


def check_point(point: ResumePoint, spec: RLJobSpec, reporter: RunReporter) -> None:
    """Logs and reports the checkpoint to resume from. Raises ConfigurationError if the job cannot continue from it."""
    for note in point.notes:
        log.warning("%s", note)
    refuse_other_job(point, spec)
    reporter.report_resume(point.status, best_of(point))


def loaded_point(checkpointing: Checkpointing, point: ResumePoint, run: Run, reporter: RunReporter) -> ResumePoint:
    """Loads the checkpoint on the workers, and reports it. Returns `point`, or an older checkpoint if the workers find
    `point` damaged. Raises CheckpointError."""
    reporter.doing(f"loads the checkpoint of step {point.state.step}")
    loaded = checkpointing.load(point, run.workers.trained, num_workers_of(run.job.spec, ACTOR))
    if loaded is not point:
        for note in loaded.notes:
            log.warning("%s", note)
        reporter.report_resume(loaded.status, best_of(loaded))
    return loaded


def best_of(point: ResumePoint) -> BestCheckpoint | None:
    """The best checkpoint so far; None if the checkpoint has no record of it."""
    return next(iter(point.state.best.checkpoints), None) if point.state.best is not None else None


def refuse_other_job(point: ResumePoint, spec: RLJobSpec) -> None:
    """Raises ConfigurationError if the job cannot continue from this checkpoint: it has fewer steps, another seed, or a
    critic that the checkpoint does not have."""
    training, steps_done, seed = spec.training, point.state.step, point.state.parts.cursor.seed
    if steps_done > training.steps:
        raise ConfigurationError(
            f"spec.training.steps: the checkpoint already has {steps_done} steps (seen: {training.steps}); set it to "
            f"at least {steps_done}, or start a new run in another folder"
        )
    if seed != training.seed:
        raise ConfigurationError(
            f"spec.training.seed: the checkpoint was trained with {seed} (seen: {training.seed}); set it to {seed}, or "
            "start a new run in another folder"
        )
    names = (tensor.name for tensor in read_manifest(point.folder)[0].tensors)
    if needs_critic(spec) and not any(name.startswith(CRITIC_PREFIX) for name in names):
        raise ConfigurationError(
            f"spec.training.algorithm: needs a critic, which the checkpoint of step {steps_done} does not have (seen: "
            f"{training.algorithm.type}); use the algorithm of the checkpoint, or start a new run in another folder"
        )
