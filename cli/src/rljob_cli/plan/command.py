"""`rljob plan`: estimates memory and step time of a job, and finds the best pools for its roles."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rljob_api.constants import ExitCode
from rljob_api.job_file import load_job_text, read_job_text
from rljob_cli.errors import CliError
from rljob_cli.plan.document import as_json, plan_document, print_document
from rljob_cli.plan.gpus import pool_gpus
from rljob_cli.plan.models import shapes_of
from rljob_cli.plan.options import PlanOptions
from rljob_cli.plan.profile import constants_for
from rljob_cli.plan.text import PlanHead, plan_lines
from rljob_planner.errors import PlanError
from rljob_planner.job_memory import with_pod_limits
from rljob_planner.job_placement import check_layouts, placement_of, spec_with
from rljob_planner.job_workload import model_sources, workload_of
from rljob_planner.plan import plan_of
from rljob_planner.plan_types import Verdict


def plan(options: PlanOptions, console: Console) -> int:
    """Prints the plan of a job file, compares a run with its plan, or fits constants to runs. Returns the exit code: 1
    if the job of a file does not fit (see `_plan_job`), else 0.

    Raises CliError if no plan can be made, and ContractError if the file is not a valid job."""
    _check_combination(options)
    try:
        if options.file is not None:
            return _plan_job(options.file, options, console)
        from rljob_cli.plan import from_run

        return from_run.calibrate(options, console) if options.calibrate else from_run.compare(options, console)
    except PlanError as error:
        raise CliError(str(error)) from None


def _check_combination(options: PlanOptions) -> None:
    """Raises CliError unless exactly one of FILE, --from-run and --calibrate is given, with options that it accepts."""
    given = {"FILE": options.file, "--from-run": options.from_run, "--calibrate": options.calibrate or None}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        seen = " and ".join(names) or "none"
        raise CliError(
            f"rljob plan: needs exactly one of {', '.join(given)} (seen {seen}); pass a job file, or a run's folder"
        )
    if options.write is not None and not options.search:
        raise CliError("--write: writes the job that --search finds, so it requires --search; add --search")
    if options.write is not None and os.path.lexists(options.write):
        raise CliError(f"--write: {options.write} already exists; choose another name")
    if options.as_json and options.explain:
        raise CliError("--explain: cannot be combined with --json, which prints no formulas; remove one of them")
    for_jobs = {
        "--search": options.search,
        "--json": options.as_json,
        "--mean-prompt": options.lengths.prompt_mean is not None,
        "--mean-response": options.lengths.response_mean is not None,
    }
    if options.file is None and (wrong := [name for name, is_given in for_jobs.items() if is_given]):
        raise CliError(f"{wrong[0]}: works with a job file only, not with a run's folder; remove it")


def _plan_job(file: Path, options: PlanOptions, console: Console) -> int:
    """Prints the plan of a job file. Returns the exit code: 0 if the job fits, else 1.

    With --search: 0 if the search found a placement that the trainer can run and in which the job fits, with no other
    field changed, else 1. With --write: 0 if the written job fits, else 1.
    """
    text = read_job_text(file)
    job = load_job_text(text, str(file))
    spec, name = job.spec, job.metadata.name
    gpus = pool_gpus(spec, options.gpus, must_fit=not options.search)
    shapes = shapes_of(model_sources(spec), file.absolute().parent, options.model_config)
    gpu_types = [group.gpu for group in gpus.cluster]
    shape_of_role = {role: found.shape for role, found in shapes.items()}
    is_cpu = any(gpu.is_cpu for gpu in gpu_types)
    workload = workload_of(spec, shape_of_role, name=name, is_cpu=is_cpu, lengths=options.lengths)
    constants = constants_for({gpu.name for gpu in gpu_types}, options.profile)
    head, file_plan = PlanHead(name, gpus, shapes, constants.source), None
    if gpus.gpus:
        placement = placement_of(spec, gpus.gpus)
        check_layouts(workload, placement)
        file_plan = with_pod_limits(plan_of(workload, placement, constants), spec)
    document = {"job": name} | ({} if file_plan is None else plan_document(file_plan, head))
    if not options.search:
        assert file_plan is not None, "the pools fit into the cluster"
        if options.as_json:
            print_document(document, console)
        else:
            _print(console, *plan_lines(file_plan, head, explain=options.explain))
        return int(ExitCode.APPLICATION if file_plan.verdict is Verdict.TOO_LARGE else ExitCode.SUCCESS)

    from rljob_cli.plan.search import changed_spec, search_lines
    from rljob_cli.plan.write import write_changed
    from rljob_planner.search.best_placement import search

    found = search(workload, gpus.cluster, constants, pool_names=[pool.name for pool in spec.pools])
    best, new_spec = found.best_supported, spec
    if best is not None:
        new_spec = spec_with(changed_spec(spec, found.changes), best.plan.placement, gpus.labels)
    can_run = best is not None and (not found.changes or options.write is not None)
    if options.as_json:
        verdict = best.plan.verdict if best is not None and can_run else Verdict.TOO_LARGE
        verdicts = {"verdict": verdict.name, "verdictOfFile": None if file_plan is None else file_plan.verdict.name}
        print_document(document | verdicts | {"search": as_json(found)}, console)
    else:
        _print(console, *search_lines(found, head, spec, new_spec, file_plan, explain=options.explain))
    if (target := options.write) is not None:
        # With --json, standard output has only the document.
        messages = Console(highlight=False, stderr=True) if options.as_json else console
        if best is None:
            _print(messages, Text(f"{target}: not written, because no placement that the trainer can run fits"))
        else:
            write_changed(text, target, spec, new_spec)
            _print(messages, Text(f"wrote {target}; next: rljob validate {shlex.quote(str(target))}"))
    return int(ExitCode.SUCCESS if can_run else ExitCode.APPLICATION)


def _print(console: Console, *lines: Text) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)
