"""`rljob plan`: memory, time and the best place of a job's roles, before it takes a GPU."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from rljob_api.constants import ExitCode
from rljob_api.job_file import load_job_text, read_job_text
from rljob_api.v1alpha1.job import RLJob
from rljob_cli.errors import CliError
from rljob_cli.plan.document import FORMAT_VERSION, KIND, plan_document, printed
from rljob_cli.plan.gpus import GpuOptions, PoolGpus, pool_gpus
from rljob_cli.plan.models import FoundShape, shapes_of
from rljob_cli.plan.profile import constants_for
from rljob_cli.plan.text import PlanHead, plan_lines
from rljob_planner.constants import Constants
from rljob_planner.errors import PlanError
from rljob_planner.job import LengthOptions, model_sources, workload_of
from rljob_planner.job_placement import check_checkpointing, check_layouts, placement_of, spec_with, with_selectors
from rljob_planner.memory_types import Verdict
from rljob_planner.plan import Plan, plan_of
from rljob_planner.workload import Role, Workload

if TYPE_CHECKING:
    from rljob_cli.plan.mapping import JobMapping

DOES_NOT_FIT = int(ExitCode.APPLICATION)
"""Exit code of a plan whose memory does not fit."""


@dataclass(frozen=True)
class PlanOptions:
    """Of `rljob plan`."""

    file: Path | None = None
    """The job; or else there is a run, or there are several to calibrate by."""
    from_run: Path | None = None
    calibrate: tuple[Path, ...] = ()
    gpus: GpuOptions = field(default_factory=GpuOptions)
    lengths: LengthOptions = field(default_factory=LengthOptions)
    model_config: Path | None = None
    profile: Path | None = None
    search: bool = False
    write: Path | None = None
    explain: bool = False
    as_json: bool = False


@dataclass(frozen=True)
class Asked:
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
    if options.file is None:
        return _of_runs(options, console)
    try:
        asked = what_is_asked(options)
        return _search(asked, options, console) if options.search else _show(asked, options, console)
    except PlanError as error:
        raise CliError(str(error)) from None


def what_is_asked(options: PlanOptions) -> Asked:
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
    return Asked(text, job, shapes, gpus, workload, constants)


def plan_as_it_is(asked: Asked) -> Plan:
    """The job with its pools as the file has them. Raises PlanError."""
    placement = placement_of(asked.job.spec, asked.gpus.gpus)
    check_layouts(asked.workload, placement)
    return plan_of(asked.workload, placement, asked.constants)


def _refuse_what_does_not_go_together(options: PlanOptions) -> None:
    given = {"FILE": options.file is not None, "--from-run": options.from_run is not None}
    given["--calibrate"] = bool(options.calibrate)
    names = [name for name, is_given in given.items() if is_given]
    if len(names) != 1:
        seen = " and ".join(names) or "none"
        raise CliError(f"rljob plan: wants one of {', '.join(given)} (seen {seen}); give a job file, or a run's folder")
    if options.write is not None and not options.search:
        raise CliError("--write: writes what --search finds; give both")
    if options.file is None:
        lengths = options.lengths
        for_jobs = {
            "--search": options.search,
            "--mean-prompt": lengths.prompt_mean is not None,
            "--mean-response": lengths.response_mean is not None,
        }
        if wrong := [name for name, is_given in for_jobs.items() if is_given]:
            raise CliError(f"{wrong[0]}: is for a job file, and a run has its own; leave it out")


def _of_runs(options: PlanOptions, console: Console) -> int:
    from rljob_cli.plan import from_run as plan_from_run

    asked = plan_from_run.RunPlanOptions(
        folders=options.calibrate if options.from_run is None else (options.from_run,),
        profile=options.profile,
        gpus=options.gpus,
        model_config=options.model_config,
        explain=options.explain,
        as_json=options.as_json,
    )
    return plan_from_run.calibrate(asked, console) if options.calibrate else plan_from_run.show(asked, console)


def _show(asked: Asked, options: PlanOptions, console: Console) -> int:
    found = plan_as_it_is(asked)
    if options.as_json:
        printed(plan_document(found, asked.head), console)
    else:
        for line in plan_lines(found, asked.head, explain=options.explain):
            console.print(line, soft_wrap=True)
    return DOES_NOT_FIT if found.verdict is Verdict.TOO_LARGE else int(ExitCode.SUCCESS)


def _search(asked: Asked, options: PlanOptions, console: Console) -> int:
    """0 where some placement that can run fits, or is written with what makes it fit."""
    from rljob_cli.plan.mapping import find_mapping
    from rljob_cli.plan.search import search_document, search_lines

    own = plan_as_it_is(asked) if asked.gpus.gpus else None
    found = find_mapping(asked.job.spec, asked.workload, asked.gpus.cluster, asked.constants)
    if options.as_json:
        document = {} if own is None else plan_document(own, asked.head)
        can_run = found.best is not None and (options.write is not None or not found.changes)
        head = {
            "formatVersion": FORMAT_VERSION,
            "kind": KIND,
            "job": asked.job.metadata.name,
            "verdict": found.best.verdict.name if found.best is not None and can_run else Verdict.TOO_LARGE.name,
            "verdictOfFile": None if own is None else own.verdict.name,
        }
        printed(head | document | head | {"search": search_document(found)}, console)
    else:
        for line in search_lines(found, asked.head, own, explain=options.explain):
            console.print(line, soft_wrap=True)
    is_written = options.write is not None and _write(asked, found, options, console)
    fits = found.best is not None and not found.changes
    return int(ExitCode.SUCCESS) if fits or is_written else DOES_NOT_FIT


def _write(asked: Asked, found: JobMapping, options: PlanOptions, console: Console) -> bool:
    """Whether there is something to write."""
    from rljob_cli.plan.write import write_mapped

    assert options.write is not None, "only what is asked for is written"
    told = Console(highlight=False, stderr=True) if options.as_json else console
    if found.best is None:
        told.print(Text(f"{options.write}: not written, because no placement that can run fits"), soft_wrap=True)
        return False
    mapped = with_selectors(spec_with(found.spec, found.best.placement), found.best.placement, asked.gpus.labels)
    write_mapped(asked.text, options.write, mapped, found.changes)
    told.print(Text(f"wrote {options.write}; next: rljob validate {shlex.quote(str(options.write))}"), soft_wrap=True)
    return True
