"""`rljob plan`: memory, time and the best place of a job's roles, before it takes a GPU."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from rljob_api.constants import ExitCode
from rljob_api.job_file import load_job_text, read_job_text
from rljob_api.v1alpha1.job import RLJob
from rljob_cli.errors import CliError
from rljob_cli.plan.document import plan_document, printed
from rljob_cli.plan.gpus import PoolGpus, pool_gpus
from rljob_cli.plan.models import FoundShape, shapes_of
from rljob_cli.plan.options import PlanOptions
from rljob_cli.plan.profile import constants_for
from rljob_cli.plan.text import PlanHead, plan_lines
from rljob_planner.constants import Constants
from rljob_planner.errors import PlanError
from rljob_planner.job import model_sources, workload_of
from rljob_planner.job_placement import check_checkpointing, check_layouts, placement_of
from rljob_planner.plan import Plan, plan_of
from rljob_planner.plan_types import Verdict
from rljob_planner.workload import Role, Workload


@dataclass(frozen=True)
class _Asked:
    """A job with all that is known of it before anything is worked out."""

    text: str
    """The job file's text."""
    job: RLJob
    shapes: dict[Role, FoundShape]
    gpus: PoolGpus
    workload: Workload
    constants: Constants

    @property
    def head(self) -> PlanHead:
        """For people."""
        num_gpus = sum(group.num_gpus for group in self.gpus.cluster)
        name, gpus = self.job.metadata.name, self.gpus
        return PlanHead(name, gpus.origin, num_gpus, self.shapes, self.constants.source, gpus.labels)


def plan(options: PlanOptions, console: Console) -> int:
    """Shows the plan of a job file, or of a run beside what it was; 0 where it fits, 1 where not.

    Raises CliError for what cannot be planned, and ContractError for a file that is no job."""
    _refuse_what_does_not_go_together(options)
    try:
        if options.file is None:
            from rljob_cli.plan import from_run

            return from_run.calibrate(options, console) if options.calibrate else from_run.show(options, console)
        asked = _what_is_asked(options)
        return _search(asked, options, console) if options.search else _show(asked, options, console)
    except PlanError as error:
        raise CliError(str(error)) from None


def _refuse_what_does_not_go_together(options: PlanOptions) -> None:
    given = {"FILE": options.file, "--from-run": options.from_run, "--calibrate": options.calibrate or None}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        seen = " and ".join(names) or "none"
        raise CliError(f"rljob plan: wants one of {', '.join(given)} (seen {seen}); give a job file, or a run's folder")
    if options.write is not None and not options.search:
        raise CliError("--write: writes what --search finds; give both")
    lengths = options.lengths
    for_jobs = {
        "--search": options.search,
        "--json": options.as_json,
        "--mean-prompt": lengths.prompt_mean is not None,
        "--mean-response": lengths.response_mean is not None,
    }
    if options.file is None and (wrong := [name for name, is_given in for_jobs.items() if is_given]):
        raise CliError(f"{wrong[0]}: is for a job file, not for a run's folder; leave it out")


def _what_is_asked(options: PlanOptions) -> _Asked:
    """The job, its models' shapes, its GPUs. Raises CliError, PlanError or ContractError."""
    assert options.file is not None, "a job is planned"
    text = read_job_text(options.file)
    job = load_job_text(text, str(options.file))
    gpus = pool_gpus(job.spec, options.gpus, must_fit=not options.search)
    shapes = shapes_of(model_sources(job.spec), options.file.absolute().parent, options.model_config)
    kinds = [group.gpu for group in gpus.cluster]
    plain = {role: found.shape for role, found in shapes.items()}
    is_cpu = any(gpu.is_cpu for gpu in kinds)
    workload = workload_of(job.spec, plain, name=job.metadata.name, is_cpu=is_cpu, lengths=options.lengths)
    check_checkpointing(workload)
    constants = constants_for({gpu.name for gpu in kinds}, options.profile)
    return _Asked(text, job, shapes, gpus, workload, constants)


def _plan_as_it_is(asked: _Asked) -> Plan:
    """The job with its pools as the file has them. Raises PlanError."""
    placement = placement_of(asked.job.spec, asked.gpus.gpus)
    check_layouts(asked.workload, placement)
    return plan_of(asked.workload, placement, asked.constants)


def _show(asked: _Asked, options: PlanOptions, console: Console) -> int:
    found = _plan_as_it_is(asked)
    if options.as_json:
        printed(plan_document(found, asked.head), console)
    else:
        for line in plan_lines(found, asked.head, explain=options.explain):
            console.print(line, soft_wrap=True)
    return int(ExitCode.APPLICATION if found.verdict is Verdict.TOO_LARGE else ExitCode.SUCCESS)


def _search(asked: _Asked, options: PlanOptions, console: Console) -> int:
    """0 where some placement that can run fits, or is written with what makes it fit."""
    from rljob_cli.plan.search import find_mapping, placed_spec, search_document, search_lines
    from rljob_cli.plan.write import write_changed

    own = _plan_as_it_is(asked) if asked.gpus.gpus else None
    spec, head, target = asked.job.spec, asked.head, options.write
    found = find_mapping(spec, asked.workload, asked.gpus.cluster, asked.constants)
    fits = found.best is not None and not found.changes
    if options.as_json:
        can_run = fits or (found.best is not None and target is not None)
        verdicts = {
            "verdict": found.best.verdict.name if found.best is not None and can_run else Verdict.TOO_LARGE.name,
            "verdictOfFile": None if own is None else own.verdict.name,
        }
        document = {"job": head.job} if own is None else plan_document(own, head)
        printed(document | verdicts | {"search": search_document(found)}, console)
    else:
        for line in search_lines(found, head, spec, own, explain=options.explain):
            console.print(line, soft_wrap=True)
    if target is not None:
        told = Console(highlight=False, stderr=True) if options.as_json else console
        if found.best is None:
            told.print(Text(f"{target}: not written, because no placement that can run fits"), soft_wrap=True)
        else:
            write_changed(asked.text, target, spec, placed_spec(found.spec, found.best.placement, head.labels))
            told.print(Text(f"wrote {target}; next: rljob validate {shlex.quote(str(target))}"), soft_wrap=True)
    return int(ExitCode.SUCCESS if fits or (found.best is not None and target) else ExitCode.APPLICATION)
