"""The trainer as a program: `python -m rljob_trainer`, with its job in the environment (see `rljob_api.contract`)."""

from __future__ import annotations

import logging
import sys
import time

from rljob_api.contract import ExitCode
from rljob_api.errors import ContractError
from rljob_api.handover import TrainerJob, load_job
from rljob_trainer.checkpoints.errors import FencedError
from rljob_trainer.controller.build import built_run
from rljob_trainer.controller.checkpointing import Checkpointing
from rljob_trainer.controller.controller import Controller
from rljob_trainer.controller.run_output import RunOutput
from rljob_trainer.controller.run_reporter import RunReporter
from rljob_trainer.controller.stop_request import StopRequest
from rljob_trainer.errors import ConfigurationError, ResourceError, TrainerError, WorkerDiedError
from rljob_trainer.observability.log import set_up_logging
from rljob_trainer.settings import Settings, driver_environment, read_settings

log = logging.getLogger("rljob_trainer")


def main() -> int:
    """Runs the job; the exit code is one of `rljob_api.contract.ExitCode`."""
    set_up_logging()
    try:
        driver_environment()
        settings = read_settings()
        job = load_job(settings.spec_text)
    except (ConfigurationError, ContractError) as error:
        log.error("%s", error)
        return ExitCode.CONFIGURATION
    pool = job.spec.pools[0]
    stop = StopRequest()
    stop.install()
    reporter: RunReporter | None = None
    try:
        reporter = RunReporter(
            settings.run_state_file,
            job.name,
            settings.attempt,
            job.spec.training.steps,
            pool.nodes * pool.gpus_per_node,
            time.time,
        )
        return run_job(job, settings, reporter, stop)
    except KeyboardInterrupt:
        lost = "what happened since the last checkpoint is lost" if stop.is_training else "no step was done"
        log.error("stopped at once; %s", lost)
        report_end(reporter, None)
        return ExitCode.INTERRUPTED
    except TrainerError as error:
        log.error("%s", error)
        report_end(reporter, error)
        return exit_code_of(error)
    except Exception as error:
        log.exception("this should not happen; please report it")
        report_end(reporter, error)
        return ExitCode.APPLICATION


def report_end(reporter: RunReporter | None, error: Exception | None) -> None:
    """Writes the last state. A state file that cannot be written must not hide why the run ended."""
    try:
        if reporter is not None and error is not None:
            reporter.failed(error)
        elif reporter is not None:
            reporter.stopped()
    except OSError as problem:
        log.error("the state file cannot be written (%s)", problem)


def run_job(job: TrainerJob, settings: Settings, reporter: RunReporter, stop: StopRequest) -> int:
    """Builds, resumes, trains, saves, exports. Raises TrainerError."""
    checkpointing = Checkpointing(job.spec.checkpoint, settings.checkpoint_folder, settings.attempt, job.name)
    point = checkpointing.find()
    first_step = point.state.step if point else 0
    if point:
        for note in point.notes:
            log.warning("%s", note)
        refuse_fewer_steps(first_step, job.spec.training.steps)
        reporter.checkpoint_saved(point.status)
    with built_run(job, settings) as run:
        output = RunOutput(
            settings.run_folder,
            job.spec.training.loggers,
            first_step if point else None,
            job.spec.training.steps,
            run.workers.num_devices,
        )
        try:
            controller = Controller(job, run, output, reporter, checkpointing, stop)
            if point:
                checkpointing.load(point, run.workers.actor, run.workers.num_devices)
                controller.cursor.restore(point.state.cursor)
                log.info("resumed from step %d (%s)", first_step, point.folder.name)
            reporter.training_started(first_step, first_step if point else None)
            output.start(first_step)
            stop.is_training = True
            if not controller.train(first_step):
                reporter.stopping()
                step = controller.save_on_stop()
                reporter.stopped()
                saved = "; its checkpoint is complete" if step else ""
                log.warning("stopped as asked after step %d%s", step, saved)
                return ExitCode.INTERRUPTED
            exported = controller.export(settings.run_folder / "export")
            reporter.complete(exported.as_uri() if exported else None)
        finally:
            output.close()
        if output.summary():
            log.info("%s", output.summary())
    return ExitCode.SUCCESS


def refuse_fewer_steps(steps_done: int, num_steps: int) -> None:
    """Raises ConfigurationError when the checkpoint is beyond the job's end."""
    if steps_done > num_steps:
        raise ConfigurationError(
            f"spec.training.steps: the checkpoint has {steps_done} steps already (seen: {num_steps}); write at least "
            f"{steps_done}, or begin a new run"
        )


def exit_code_of(error: TrainerError) -> ExitCode:
    """The class of a failure, as the operator sees it."""
    if isinstance(error, ConfigurationError):
        return ExitCode.CONFIGURATION
    if isinstance(error, ResourceError | WorkerDiedError | FencedError):
        return ExitCode.INFRASTRUCTURE
    return ExitCode.APPLICATION


if __name__ == "__main__":
    sys.exit(main())
