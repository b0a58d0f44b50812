"""`rljob plan --from-run` compares a run with its plan; `--calibrate` fits the planner's constants to runs."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from rljob.plain_text import time_text
from rljob_api.constants import ExitCode
from rljob_cli.errors import CliError
from rljob_cli.plan.gpus import pool_gpus, this_machine
from rljob_cli.plan.models import shapes_of
from rljob_cli.plan.options import GpuOptions, PlanOptions
from rljob_cli.plan.profile import Profile, constants_for, default_constants, default_file, write_profile
from rljob_cli.plan.run_record import RunRecord, read_run
from rljob_cli.plan.run_text import calibration_lines, run_lines
from rljob_page.run_files import METRICS_FILE_NAME
from rljob_planner.advice.calibration import CalibrationRun, calibrated
from rljob_planner.advice.comparison import ComparedMemory, ComparedTime, compared_memory, compared_times, process_bytes
from rljob_planner.advice.run_facts import facts_of, observed_workload, workload_for_memory
from rljob_planner.advice.tuning import RunReport, advice_of, findings_of, together
from rljob_planner.constants import Constants
from rljob_planner.job_placement import check_layouts, placement_of
from rljob_planner.job_workload import model_sources, workload_of
from rljob_planner.memory.phases import phases_of
from rljob_planner.plan import plan_of
from rljob_planner.timing.step import step_time
from rljob_planner.workload import Role


def compare(options: PlanOptions, console: Console) -> int:
    """Prints the comparison of a run with its plan, and suggested changes. Raises CliError or PlanError."""
    for line in run_lines(run_report(options), explain=options.explain):
        console.print(line, soft_wrap=True)
    return int(ExitCode.SUCCESS)


def calibrate(options: PlanOptions, console: Console) -> int:
    """Fits the planner's constants to runs, writes them to a profile, and prints how well they predict the runs. Raises
    CliError or PlanError."""
    runs = [calibration_run(read_run(folder), options) for folder in options.calibrate]
    defaults = default_constants({pool.gpu.name for run in runs for pool in run.placement.pools})
    constants = calibrated(runs, defaults)
    gpu_type = runs[0].placement.pools[0].gpu.name
    file = options.profile or default_file(gpu_type)
    write_profile(file, Profile(gpu_type, constants, tuple(run.name for run in runs), time_text(datetime.now(UTC))))
    times = [(run.name, _compared_times(run, constants), _compared_times(run, defaults)) for run in runs]
    for line in calibration_lines(str(file), gpu_type, times):
        console.print(line, soft_wrap=True)
    return int(ExitCode.SUCCESS)


def run_report(options: PlanOptions) -> RunReport:
    """A run compared with its plan, with findings and suggested changes. Raises CliError or PlanError."""
    assert options.from_run is not None, "called with --from-run only"
    return report_of(read_run(options.from_run), options)


def report_of(record: RunRecord, options: PlanOptions) -> RunReport:
    """The same for a run that was read before."""
    run = calibration_run(record, options)
    constants = constants_for({pool.gpu.name for pool in run.placement.pools}, options.profile)
    workload = observed_workload(run.workload, run.facts)
    plan = plan_of(workload, run.placement, constants, with_proposals=False)
    times, memory = compared(run, constants)
    return RunReport(
        name=run.name,
        state=record.state,
        constants=constants.source,
        facts=run.facts,
        plan=plan,
        times=times,
        memory=memory,
        findings=findings_of(run.facts, plan),
        advice=advice_of(workload, run.placement, constants),
        together=together(workload, run.placement, constants),
    )


def compared(run: CalibrationRun, constants: Constants) -> tuple[tuple[ComparedTime, ...], tuple[ComparedMemory, ...]]:
    """Predicted and measured seconds and bytes. Seconds are predicted for the run's average lengths, bytes for the
    lengths of the step that trained on the most tokens."""
    largest_step = workload_for_memory(run.workload, run.facts)
    pool = run.placement.pool_of(Role.ACTOR)
    phases = phases_of(pool, largest_step, constants)
    process = process_bytes(phases, largest_step, pool.rollout)
    return _compared_times(run, constants), compared_memory(phases, run.facts, process)


def _compared_times(run: CalibrationRun, constants: Constants) -> tuple[ComparedTime, ...]:
    step = step_time(observed_workload(run.workload, run.facts), run.placement, constants)
    return compared_times(step, run.facts)


def calibration_run(record: RunRecord, options: PlanOptions | None = None) -> CalibrationRun:
    """The facts of a run, and the workload and placement from which the planner predicts them. Raises CliError or
    PlanError."""
    options, spec = options or PlanOptions(), record.job.spec
    facts = facts_of(record.lines, spec.training.batch_size, str(record.folder / METRICS_FILE_NAME))
    # The folder of a run does not say where the job file was. Most users start both the run and this command in the
    # folder of the job file.
    shapes = shapes_of(model_sources(spec), Path.cwd(), options.model_config, offline=options.offline)
    if not facts.has_gpu and options.gpus == GpuOptions():
        # A run on CPUs is assumed to be from a machine like this one.
        gpus = {pool.name: this_machine(spec) for pool in spec.pools}
    else:
        gpus = pool_gpus(spec, options.gpus).gpus
    is_cpu = any(gpu.is_cpu for gpu in gpus.values())
    if facts.has_gpu == is_cpu:
        seen = "GPUs; name their type, such as --gpu H100" if facts.has_gpu else "CPUs; use --gpu cpu, or no GPU option"
        raise CliError(f"--gpu: the metrics show that the run was on {seen}")
    shape_of_role = {role: found.shape for role, found in shapes.items()}
    workload = workload_of(spec, shape_of_role, name=record.job.metadata.name, is_cpu=is_cpu)
    placement = placement_of(spec, gpus)
    check_layouts(workload, placement)
    return CalibrationRun(str(record.folder), facts, workload, placement)
