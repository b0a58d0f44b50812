"""The trainer's entry point: `python -m rljob_trainer`. The job and all settings come from environment variables (see
`settings`)."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping

from rljob_api.constants import ENV_POOL_NODES, ExitCode
from rljob_api.contract_documents import TrainerJob, load_job
from rljob_api.elastic import with_nodes
from rljob_api.errors import ContractError
from rljob_api.standard_streams import accept_all_characters
from rljob_api.v1alpha1.checkpoint import Resume
from rljob_api.v1alpha1.rules import violations
from rljob_trainer.attempt_logs import attempt_folder, keep_tail
from rljob_trainer.checkpoints.bucket_run_folder import BucketRunFolder
from rljob_trainer.checkpoints.errors import FencedError, StorageUnavailableError
from rljob_trainer.checkpoints.fencing import newest_of_job
from rljob_trainer.checkpoints.storage import checkpoint_location
from rljob_trainer.controller.run_reporter import RunReporter
from rljob_trainer.controller.stop_request import StopRequest
from rljob_trainer.early_checks import refuse_missing
from rljob_trainer.errors import ConfigurationError, ResourceError, TrainerError, WorkerDiedError
from rljob_trainer.observability.log import set_up_logging
from rljob_trainer.settings import Settings, read_settings, run_state_target, set_driver_environment
from rljob_trainer.stack_traces import StackFile
from rljob_trainer.trackers.trackers import Trackers
from rljob_trainer.user_functions import refuse_hiding_modules

log = logging.getLogger("rljob_trainer")


def main() -> int:
    """Runs the job. Returns the exit code of the process, one of `rljob_api.constants.ExitCode`."""
    accept_all_characters()
    set_up_logging()
    stop = StopRequest()
    stop.install()
    trackers = Trackers()
    bucket_copy = BucketRunFolder()
    code = run_to_end(stop, trackers, bucket_copy)
    bucket_copy.end()
    # Last, because a tracker may be slow: the run state and the checkpoint are complete by now.
    trackers.end(code, lambda: stop.is_requested)
    return code


def run_to_end(stop: StopRequest, trackers: Trackers, bucket_copy: BucketRunFolder) -> int:
    """Runs the job and reports its end. Returns the exit code; raises nothing."""
    reporter: RunReporter | None = None
    settings: Settings | None = None
    try:
        set_driver_environment()
        settings = read_settings()
        StackFile(settings.run_folder, "controller")
        job = with_nodes_of_attempt(load_job(settings.spec_text), settings.pool_nodes)
        # The run state is written before two things that take long: the storage of checkpoints may hang, and loading
        # torch takes seconds.
        reporter = reporter_of(job, settings)
        settings = bucket_copy.prepare(job, settings)
        report_resume(reporter, job, settings)
        # All pods of a job on a cluster have the same image.
        runs_workers_here = settings.is_ray_job or not settings.ray_address
        refuse_missing(
            job.spec,
            settings.job_folder,
            settings.environment,
            settings.run_folder,
            runs_workers_here=runs_workers_here,
        )
        trackers.start(job.spec.training.trackers, settings)
        log.info("job %s, attempt %d: loading libraries", job.name, settings.attempt)
        try:
            from rljob_trainer.controller.run import run_job
        except Exception as error:
            refuse_hiding_modules(error)
            raise

        return run_job(job, settings, reporter, stop, trackers, bucket_copy)
    except KeyboardInterrupt:
        return report_immediate_stop(reporter, stop)
    except (TrainerError, ContractError) as error:
        if stop.is_requested and not stop.is_training:
            # The stop request interrupted the setup, which then failed with this error.
            return report_immediate_stop(reporter, stop)
        log.error("%s", error)
        report_end(reporter, error)
        keep_worker_log(error, settings)
        return exit_code_of(error)
    except (Exception, SystemExit) as error:
        # The trainer itself never calls sys.exit(). If other code does, the job is not done, whatever the exit code.
        log.exception("unexpected error in the trainer (probably a bug); please report it with this traceback")
        report_end(reporter, error)
        return ExitCode.APPLICATION


def with_nodes_of_attempt(job: TrainerJob, nodes: Mapping[str, int]) -> TrainerJob:
    """Returns the job with the node counts of this attempt, which may be lower than in the job's spec. `nodes` maps
    names of pools to node counts. Raises ConfigurationError if the job has no such pool or cannot run on that many
    nodes."""
    if not nodes:
        return job
    unknown = nodes.keys() - {pool.name for pool in job.spec.pools}
    spec = with_nodes(job.spec, nodes)
    broken = [found.message for found in violations(spec)]
    if unknown or broken:
        why = f"there is no pool {min(unknown)}" if unknown else broken[0]
        raise ConfigurationError(
            f"{ENV_POOL_NODES}: {why}; the operator that set this variable has a different version than the trainer; "
            "use the same version for both"
        )
    log.info(
        "this attempt runs on fewer nodes than the job specifies: %s",
        ", ".join(f"{number} of pool {name}" for name, number in nodes.items()),
    )
    return job.model_copy(update={"spec": spec})


def report_immediate_stop(reporter: RunReporter | None, stop: StopRequest) -> ExitCode:
    """Logs and reports that the run was stopped without saving. Returns the exit code."""
    lost = "progress since the last checkpoint is lost" if stop.is_training else "training had not started"
    log.error("stopped immediately, without saving; %s", lost)
    report_end(reporter, None)
    return ExitCode.INTERRUPTED


def reporter_of(job: TrainerJob, settings: Settings) -> RunReporter:
    """Creates the reporter, which writes the first run state. Raises ResourceError if this file cannot be written."""
    try:
        return RunReporter(
            settings.run_state_file,
            job.name,
            settings.attempt,
            job.spec.training.steps,
            sum(pool.nodes * pool.gpus_per_node for pool in job.spec.pools),
            time.time,
        )
    except OSError as problem:
        raise unwritable_state(settings, problem) from problem


def report_resume(reporter: RunReporter, job: TrainerJob, settings: Settings) -> None:
    """Reports the checkpoint from which this start will probably resume, if there is one. This reads the checkpoints'
    storage, and the storage may hang. Raises ResourceError if the run state cannot be written."""
    if job.spec.checkpoint.resume is Resume.NEVER:
        return
    try:
        reporter.doing("looks for a checkpoint")
        root = checkpoint_location(job, settings.checkpoint_folder)
        resumed = newest_of_job(root, settings.start_number, job.name)
        if resumed is not None:
            reporter.report_resume(resumed)
    except OSError as problem:
        raise unwritable_state(settings, problem) from problem


def unwritable_state(settings: Settings, problem: OSError) -> ResourceError:
    """Returns the error for a run state file that cannot be written."""
    return ResourceError(
        f"{settings.run_state_file}: cannot write the run state ({problem.strerror}); check that the folder is "
        "writable and that the disk is not full"
    )


def keep_worker_log(error: TrainerError | ContractError, settings: Settings | None) -> None:
    """Copies the end of the failed worker's log to the attempt's folder, because later attempts append to the log."""
    worker = error.worker if isinstance(error, TrainerError) else None
    if settings is None or worker is None or worker.log_file is None:
        return
    try:
        folder = attempt_folder(settings.run_folder, settings.attempt)
        log.info("end of the failed worker's log: %s", keep_tail(worker.log_file, folder, worker.role, worker.rank))
    except OSError as problem:
        log.warning("%s: cannot copy the end of the failed worker's log (%s)", worker.log_file, problem)


def report_end(reporter: RunReporter | None, error: Exception | SystemExit | None) -> None:
    """Writes the final run state. `error` is None if the run was stopped. Never raises OSError: a write error must not
    hide why the run ended."""
    try:
        if reporter is None and (target := run_state_target()):
            # The run ended before there was a reporter, usually because the job is invalid. Its name and its number of
            # steps may be unknown, so they are left empty.
            path, attempt = target
            reporter = RunReporter(path, "", attempt, 0, 1, time.time)
        if reporter is not None and error is not None:
            reporter.failed(error)
        elif reporter is not None:
            reporter.stopped()
    except OSError as problem:
        log.error("cannot write the run state file (%s)", problem)


def exit_code_of(error: TrainerError | ContractError) -> ExitCode:
    """Returns the exit code by which the operator classifies the failure."""
    if isinstance(error, ConfigurationError | ContractError):
        return ExitCode.CONFIGURATION
    if isinstance(error, ResourceError | WorkerDiedError | FencedError | StorageUnavailableError):
        return ExitCode.INFRASTRUCTURE
    return ExitCode.APPLICATION


if __name__ == "__main__":
    sys.exit(main())
